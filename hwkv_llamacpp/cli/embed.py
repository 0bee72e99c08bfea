"""`hwkv embed`: a copy of a model that carries a policy."""

import argparse
from pathlib import Path

from ..gguf.embed import embed
from ..gguf.geometry import ModelGeometry
from ..policy.policy import Policy
from . import output
from .arguments import check_order, force_flag, json_flag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a copy of a model that carries a policy. The copy has the policy in its metadata; every other key and"
        " all tensor data are copied unchanged, and any llama.cpp can load it. A policy that the model carries already"
        " is replaced. Of a split model the first shard gets the policy, and -o gives the prefix of all names."
    )
    parser.epilog = "example:\n  hwkv embed model.gguf policy.json -o model-hwkv.gguf"
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file, or any shard of a split one")
    parser.add_argument("policy", type=Path, metavar="POLICY", help="policy JSON, or a GGUF that carries one")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT.gguf", help="file to write")
    parser.add_argument(
        "--link", action="store_true", help="hard-link the further shards of a split model where possible"
    )
    force_flag(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> None:
    check_order(args)
    policy = Policy.load(args.policy)
    policy.check(ModelGeometry.from_gguf(args.model), args.policy)  # embed() does, too, but cannot name the file
    paths = embed(args.model, policy, args.output, force=args.force, link_shards=args.link, progress=True)
    if args.json:
        output.print_json({"written": [str(path) for path in paths]})
        return
    for path in paths:
        print(f"wrote {path}")
