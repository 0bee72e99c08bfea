"""The hwkv command: parse, call, print."""

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from .. import __version__
from ..base.names import as_text, message
from ..errors import HwkvError
from .arguments import HelpFormatter

# a command is a file of this folder, imported when it is asked for
COMMANDS = {
    "info": "geometry of a model: which layers take windows, and what their KV costs",
    "policy": "make, show and check policies",
    "embed": "write a copy of a model that carries a policy",
    "extract": "print or save the policy that a model carries",
    "calibrate": "find a policy for a model",
    "serve": "run llama-server on a model, with a policy",
    "plan": "predict what a server would take, and the largest context that fits",
    "bench": "measure memory, speed and capacity of fresh servers",
    "report": "tables and figures from measurements",
    "demo": "see the saving on a small real model, end to end",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0, 1 failed, 130 interrupted. SystemExit(2) is bad usage."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)  # so that half-written files are removed
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="surrogateescape")  # a file's name may be no text
    try:
        args = build_parser(argv).parse_args(argv)
        code = args.run(args)
        sys.stdout.flush()
        return code or 0
    except HwkvError as error:
        print(f"error: {message(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"\n{interrupt}" if interrupt.args else "\ninterrupted; no file was left half written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `hwkv info MODEL | head`
        _close_stdout()
        return 1
    except OSError as error:
        if error.filename is None:  # of stdout
            _close_stdout()
        what = "cannot print" if error.filename is None else as_text(os.fsdecode(error.filename))
        print(f"error: {message(what)}: {error.strerror}", file=sys.stderr)
        return 1


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser. Only the command that argv names gets its options: importing all would take long."""
    parser = argparse.ArgumentParser(
        prog="hwkv",
        description="Per-KV-head windows for llama.cpp's KV cache. A policy gives each KV head of a model a"
        " window of recent tokens, or all of them; the server keeps only what the windows can see.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The usual order:\n"
        "  hwkv info model.gguf                        what can be configured\n"
        "  hwkv calibrate model.gguf -o policy.json\n"
        "  hwkv embed model.gguf policy.json -o model-hwkv.gguf\n"
        "  hwkv serve model-hwkv.gguf -- -c 32768",
    )
    parser.add_argument("--version", action="version", version=f"hwkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, formatter_class=HelpFormatter)
        if name == wanted:
            module = importlib.import_module(f"..cli.{name}", __package__)
            command.set_defaults(run=getattr(module, "run", None))
            module.add_arguments(command)
    return parser


def _close_stdout() -> None:
    """Drops what is still buffered, so that Python does not fail on it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)
