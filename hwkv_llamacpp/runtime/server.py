"""LlamaServer: one fresh llama-server process, from start to exit cause.

with LlamaServer(ServerOptions(model="model.gguf", policy="policy.json", n_ctx=8192)) as server:
    answer = server.post("/completion", {"prompt": "Hello", "n_predict": 16})
"""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil
import requests

from ..errors import HwkvError
from . import native

HOST = "127.0.0.1"


def flag(name: str, default: Any = None) -> Any:
    """A field that becomes a llama-server flag; None leaves the flag out, True and False choose between "a|b"."""
    return field(default=default, metadata={"flag": name})


@dataclass
class ServerOptions:
    """What a server is started with; every field but the last four is a flag of llama-server."""

    model: str | os.PathLike | None = flag("-m")  # None: a router
    policy: str | os.PathLike | None = flag("--hwkv-policy")  # a file, "embedded" or "off"
    n_ctx: int | None = flag("-c")
    n_batch: int | None = flag("-b")
    n_ubatch: int | None = flag("-ub")
    n_parallel: int | None = flag("-np")
    n_threads: int | None = flag("-t")
    n_gpu_layers: int | None = flag("-ngl")
    flash_attn: str | None = flag("-fa")  # "on", "off" or "auto"
    type_k: str | None = flag("-ctk")
    type_v: str | None = flag("-ctv")
    kv_unified: bool | None = flag("--kv-unified|--no-kv-unified")
    context_shift: bool | None = flag("--context-shift|--no-context-shift")
    fit: str | None = flag("-fit", "off")  # "on" lets llama.cpp change n_ctx and offloading to fit the memory
    slot_save_path: str | os.PathLike | None = flag("--slot-save-path")
    port: int = flag("--port", 0)  # 0: one that the system chooses
    extra: tuple[str, ...] = ()  # more flags, as they are
    environment: dict[str, str] = field(default_factory=dict)
    upstream: bool = False  # run the unpatched build; `policy` must be None
    start_timeout_s: float = 300

    def arguments(self) -> list[str]:
        """The command line without the program."""
        words = []
        for item in fields(self):
            value = getattr(self, item.name)
            name = item.metadata.get("flag")
            if name is None or value is None:
                continue
            if "|" in name:
                words.append(name.split("|")[0 if value else 1])
            else:
                words += [name, str(value)]
        return words + list(self.extra)


class LlamaServer:
    """One llama-server process on a port of 127.0.0.1. Its log is kept at `log_path`; without one, in a temporary
    file that is removed when a server that came up is stopped.

    LLAMA_ARG_* variables of the caller are not passed on: a server is what its options say. Raises HwkvError, with the
    exit cause, where the process does not come up, and TimeoutError where it neither answers nor ends.

    For measurements: `setup` is called in the new process before it becomes the server, `launched` with its process id
    right after.
    """

    def __init__(
        self,
        options: ServerOptions,
        log_path: str | os.PathLike[str] | None = None,
        setup: Callable[[], None] | None = None,
        launched: Callable[[int], None] | None = None,
    ) -> None:
        self.options = options
        self.setup = setup
        self.launched = launched
        self._temporary = log_path is None
        if log_path is None:
            handle, log_path = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
            os.close(handle)
        self.log_path = Path(log_path)
        self.process: subprocess.Popen | None = None
        self.port: int | None = None
        self._is_up = False
        self._kept_log: str | None = None  # the text of a log that was removed

    def __enter__(self) -> "LlamaServer":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the process and waits until it has loaded the model."""
        program = native.binary("llama-server", self.options.upstream)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")} | self.options.environment
        self.port, self._is_up, self._kept_log = None, False, None
        command = [str(program), *self.options.arguments(), "--host", HOST]
        with open(self.log_path, "w", errors="surrogateescape") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                preexec_fn=self.setup,
            )
        try:
            if self.launched:
                self.launched(self.process.pid)
            self._wait_until_healthy()
            self._is_up = True
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self) -> None:
        assert self.process
        deadline = time.monotonic() + self.options.start_timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise HwkvError(f"llama-server did not start: {self.exit_cause()}; its log is {self.log_path}.")
            self.port = self.port or listening_port(self.process.pid)
            if self.port and self._answers():
                return
            time.sleep(0.05)
        raise TimeoutError(
            f"llama-server was not ready after {self.options.start_timeout_s:g} s; its log is {self.log_path}."
        )

    def _answers(self) -> bool:
        try:
            status = requests.get(f"{self.url}/health", timeout=5).status_code
        except requests.RequestException:
            return False
        return status == 200 and self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """Ends the process: asks first, kills after 10 s. Does nothing where it has ended."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._temporary and self._is_up:
            self._kept_log = self.log()
            self.log_path.unlink()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def log(self) -> str:
        """Everything the process has printed so far."""
        return self.log_path.read_text(errors="replace") if self._kept_log is None else self._kept_log

    def exit_cause(self) -> str | None:
        """None while the process runs; else how it ended, with the last error that it logged."""
        code = self.process.poll() if self.process else None
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        error = last_error(self.log())
        return f"{how}: {error}" if error else how

    def get(self, path: str, timeout: float = 60) -> Any:
        return self._send("GET", path, None, timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float = 600) -> Any:
        """The reply as a dict. Raises HwkvError for any status but 200 and for a process that ends meanwhile."""
        return self._send("POST", path, body, timeout)

    def stream(self, path: str, body: dict[str, Any], timeout: float = 600) -> Iterator[dict[str, Any]]:
        """As `post`, for a reply in pieces: yields each as a dict when it comes. The timeout is that of one piece."""
        with self._request("POST", path, {**body, "stream": True}, timeout, stream=True) as reply:
            try:
                for line in reply.iter_lines():
                    if line.startswith(b"data: ") and line != b"data: [DONE]":
                        piece = json.loads(line[6:])
                        if "error" in piece:
                            raise HwkvError(f"llama-server answered {path} with an error: {str(piece['error'])[:200]}.")
                        yield piece
            except requests.RequestException:
                raise self._lost(path) from None
            except ValueError:
                raise HwkvError(
                    f"llama-server answered {path} with something else than JSON; its log is {self.log_path}."
                ) from None

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        try:
            return self._request(method, path, body, timeout).json()
        except ValueError:
            raise HwkvError(
                f"llama-server answered {path} with something else than JSON; its log is {self.log_path}."
            ) from None

    def _lost(self, path: str) -> HwkvError:
        """The error for a connection that broke."""
        assert self.process
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            return HwkvError(f"llama-server closed the connection on {path}; its log is {self.log_path}.")
        return HwkvError(f"llama-server ended on {path}: {self.exit_cause()}; its log is {self.log_path}.")

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float, stream: bool = False
    ) -> requests.Response:
        """The reply, with status 200. It is the process's own: as long as that lives, nobody else has its port."""
        assert self.process
        try:
            reply = requests.request(method, self.url + path, json=body, timeout=timeout, stream=stream)
        except requests.ConnectionError:
            raise self._lost(path) from None
        if self.process.poll() is not None:
            reply.close()
            raise self._lost(path)
        if reply.status_code != 200:
            try:
                message = reply.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = reply.text.strip()[:200]
            raise HwkvError(f"llama-server answered {path} with status {reply.status_code}: {message.rstrip('.')}.")
        return reply

    def props(self) -> dict[str, Any]:
        """GET /props; the key "hwkv" says what the grouped cache holds."""
        return self.get("/props")

    def memory(self) -> dict[str, int] | None:
        """Bytes resident now and at most so far, from /proc: {"rss_bytes", "rss_peak_bytes"}; None where there is no
        /proc."""
        assert self.process
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return None
        kib = {name: int(value) for name, value in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE)}
        return {"rss_bytes": kib["VmRSS"] * 1024, "rss_peak_bytes": kib["VmHWM"] * 1024} if len(kib) == 2 else None


def listening_port(pid: int) -> int | None:
    """The port that a process listens on, as the kernel says, or None so far. What answers on a port may be anybody."""
    try:
        connections = psutil.Process(pid).net_connections("tcp4")
    except psutil.Error:
        return None
    return next((c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN), None)


def free_port() -> int:
    """A port that nobody listens on at the moment, for programs that cannot choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def last_error(log: str) -> str | None:
    """The line of a llama-server log that says best why it ended, or None."""
    lines = [re.sub(r"^[\d.]+ [A-Z] ", "", line.strip()) for line in log.splitlines()[1:]]
    for pattern in (
        r"hwkv.*(error|refus|not |cannot)",
        r"out of memory",
        r"GGML_ASSERT|GGML_ABORT",
        r"couldn't bind",
        r"^error",
        r"error loading model|failed to initialize the context|llama_init_from_model",
        r"error|failed|terminate",
    ):
        found = [line for line in lines if re.search(pattern, line, re.IGNORECASE)]
        if found:
            return found[-1].rstrip(".")
    return None
