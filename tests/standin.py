"""A stand-in for llama-server whose ends are scripted, for ends that the real one cannot be made to have.

STANDIN names the end: "ok", or one of ENDS, where "prefill" and "decode" ends wait for the request. "END>N" has that
end only at -c above N. "other-model", "other-policy" and "other-build" answer /props as another server would.
STANDIN_FINGERPRINT is that of the policy in use, where one is. STANDIN_COUNT is a file that counts starts, for ends
that differ from run to run: "flaky" ends every third time.
"""

import ctypes
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

OUT_OF_MEMORY = "ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 123456789"


def say(text):
    print(text, flush=True)


def out_of_memory():
    say(OUT_OF_MEMORY)
    sys.stdout.flush()
    os.abort()


def segfault():
    ctypes.string_at(0)


ENDS = {
    "oom": out_of_memory,
    "abort": os.abort,
    "segfault": segfault,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit0": lambda: os._exit(0),
    "hang": lambda: time.sleep(600),
    "error": lambda: (say("error: something else"), os._exit(3)),
}


def argument(name, default=None):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def wanted_end():
    """(name, phase), or None"""
    text, above = os.environ.get("STANDIN", "ok").partition(">")[::2]
    if above and int(argument("-c", "0")) <= int(above):
        return None
    if count := os.environ.get("STANDIN_COUNT"):
        path = Path(count)
        n = int(path.read_text() or "0") + 1 if path.exists() else 1
        path.write_text(str(n))
        if text == "flaky":
            return ("oom", "prefill") if n % 3 == 0 else None
    if text.startswith("other-"):
        return text, "start"
    name, _, phase = text.partition("-")
    return None if name == "ok" else (name, phase or "start")


class Handler(BaseHTTPRequestHandler):
    end = None
    protocol_version = "HTTP/1.0"

    def log_message(self, *words):
        pass

    def reply(self, body, kind="application/json"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        if body is not None:
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def do_GET(self):
        self.reply({"status": "ok"} if self.path == "/health" else self.props())

    def props(self):
        props = {"model_path": argument("-m")}
        policy = argument("--hwkv-policy")
        if policy:
            windows = json.loads(Path(policy).read_text())["layers"] if policy != "off" else []
            is_full = all(w == "full" for layer in windows for w in layer["windows"])
            props["hwkv"] = (
                {"active": False}
                if is_full
                else {
                    "active": True,
                    "fingerprint": os.environ["STANDIN_FINGERPRINT"],
                    "kv_bytes": int(argument("-c")) * 512,
                }
            )
        if self.end == ("other-model", "start"):
            props["model_path"] = "another.gguf"
        if self.end == ("other-policy", "start"):
            props["hwkv"] = {"active": True, "fingerprint": "0123456789abcdef", "kv_bytes": 1}
        if self.end == ("other-build", "start"):
            props.pop("hwkv", None) or props.update(hwkv={"active": False})
        return props

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self.reply({"tokens": [1, 2, 3]})
        name, phase = self.end or (None, None)
        if phase == "prefill":
            ENDS[name]()
        n, n_predict = len(body["prompt"]), body["n_predict"]
        self.reply(None, "text/event-stream")
        if name == "garbage":
            self.wfile.write(b"data: {{{\xff\n\n")
            return
        self.wfile.write(b'data: {"tokens": [5], "stop": false}\n\n')
        self.wfile.flush()
        time.sleep(0.05)
        if phase == "decode":
            ENDS[name]()
        timings = {
            "prompt_n": n,
            "cache_n": 0,
            "predicted_n": n_predict,
            "prompt_ms": 10.0,
            "predicted_ms": 10.0,
            "prompt_per_second": n * 100.0,
            "predicted_per_second": n_predict * 100.0,
        }
        if name == "cached":
            timings |= {"prompt_n": 1, "cache_n": n - 1}
        if name == "short":
            timings["predicted_n"] = 1
        self.wfile.write(b"data: " + json.dumps({"tokens": [], "stop": True, "timings": timings}).encode() + b"\n\n")


def main():
    end = wanted_end()
    sys.stdout.buffer.write(b"\xff\xfe\x00 garbage \x80 on stdout\n")
    sys.stdout.flush()
    n_cells = -(-int(argument("-c")) // 256) * 256
    size = f"{n_cells * 2048 / 2**20:7.2f} MiB"
    say(f"llama_kv_cache: size = {size} ({n_cells} cells, 2 layers, 1/1 seqs), K (f16): 0 MiB, V (f16): 0 MiB")
    if end and end[1] == "start" and end[0] in ENDS:
        ENDS[end[0]]()
    Handler.end = end
    HTTPServer(("127.0.0.1", int(argument("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
