"""Options that several commands share, and what they mean."""

import argparse
import os
from contextlib import suppress
from pathlib import Path

from ..base import options
from ..errors import HwkvError
from ..gguf.file import MAGIC
from ..policy.footprint import CACHE_TYPES

ENVIRONMENT = "LLAMA_ARG_HWKV_POLICY"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the description, keeps the example's lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("example:"):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def add_context_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds -b, -ub, -ngl, -ctk and -ctv."""
    parser.add_argument(
        "-b", "--batch-size", type=options.count, default=2048, metavar="N", help="logical batch (default: 2048)"
    )
    parser.add_argument(
        "-ub", "--ubatch-size", type=options.count, default=512, metavar="N", help="physical batch (default: 512)"
    )
    parser.add_argument(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        type=int,
        default=None,
        metavar="N",
        help="layers on the GPU (default: llama.cpp's)",
    )
    parser.add_argument("-ctk", "--cache-type-k", choices=CACHE_TYPES, default="f16", help="type of K (default: f16)")
    parser.add_argument("-ctv", "--cache-type-v", choices=CACHE_TYPES, default="f16", help="type of V (default: f16)")


def policy_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --policy, whose value policy_choice() takes."""
    parser.add_argument(
        "--policy",
        metavar="P",
        help='policy JSON, a GGUF with an embedded policy, "embedded" or "off" '
        f"(default: ${ENVIRONMENT}, else the policy in MODEL, if it has one)",
    )


def output_flag(command: argparse.ArgumentParser) -> None:
    """Adds -o for a policy, and --force."""
    command.add_argument("-o", "--output", type=Path, metavar="POLICY.json", help="file to write (default: print it)")
    force_flag(command)


def force_flag(command: argparse.ArgumentParser) -> None:
    """Adds --force."""
    command.add_argument("--force", action="store_true", help="replace a file that exists")


def json_flag(command: argparse.ArgumentParser) -> None:
    """Adds --json."""
    command.add_argument("--json", action="store_true", help="print JSON")


def policy_choice(given: str | None) -> str | None:
    """The value of --policy, or else that of the environment; None if there is neither.

    HwkvError for a pipe: we and the server both read the policy, and a pipe can be read once.
    """
    choice = given or os.environ.get(ENVIRONMENT)
    if choice and choice not in ("embedded", "off") and os.path.exists(choice) and not os.path.isfile(choice):
        raise HwkvError(f"{choice}: not a regular file: the policy is read twice, so a file expected")
    return choice


def check_order(args: argparse.Namespace) -> None:
    """HwkvError if MODEL and POLICY were given the other way round."""

    def is_gguf(path: Path) -> bool:
        with open(path, "rb") as file:
            return file.read(4) == MAGIC

    with suppress(OSError):  # the one who reads the file later says why it cannot
        # the model first: a policy may come from a pipe, which can be read once
        if not is_gguf(args.model) and is_gguf(args.policy):
            raise HwkvError(f"{args.model}: not a GGUF file, but {args.policy} is one: MODEL comes first, then POLICY")
