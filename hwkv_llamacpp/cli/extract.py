"""`hwkv extract`: the policy that a model carries."""

import argparse
from pathlib import Path

from ..errors import HwkvError
from ..gguf.embed import read_policy
from . import output
from .arguments import output_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints or saves the policy that a model carries. Gives back the policy that was embedded, as the canonical"
        " JSON that every hwkv command writes."
    )
    parser.epilog = "example:\n  hwkv extract model-hwkv.gguf -o policy.json"
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file")
    output_flag(parser)


def run(args: argparse.Namespace) -> None:
    policy = read_policy(args.model)
    if policy is None:
        raise HwkvError(f"{args.model}: has no embedded policy")
    output.write_policy(args, policy)
