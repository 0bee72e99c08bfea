"""`hwkv info`: geometry of a model, and the policy that it carries."""

import argparse
from pathlib import Path

from ..gguf.embed import read_policy
from ..gguf.geometry import ModelGeometry
from . import output
from .arguments import json_flag

MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Geometry of a model: which layers take windows, and what their KV costs. Reads only the header of the file, so"
        " it is as quick for 400 GB as for 1. Any shard of a split model will do."
    )
    parser.epilog = "example:\n  hwkv info model.gguf\n  hwkv info model.gguf --json | jq .kv_bytes_per_token"
    parser.add_argument("model", type=Path, metavar="MODEL", help="GGUF file")
    json_flag(parser)


def run(args: argparse.Namespace) -> None:
    geometry = ModelGeometry.from_gguf(args.model)
    policy = read_policy(args.model)
    if args.json:
        return output.print_json(
            {
                "architecture": geometry.architecture,
                "name": geometry.name,
                "n_layer": geometry.n_layer,
                "n_ctx_train": geometry.n_ctx_train,
                "configurable_layers": [
                    {
                        "layer": x.layer,
                        "n_head": x.n_head,
                        "n_head_kv": x.n_head_kv,
                        "head_dim_k": x.head_dim_k,
                        "head_dim_v": x.head_dim_v,
                    }
                    for x in geometry.configurable
                ],
                "other_layers": [{"layer": x.layer, "kind": x.kind} for x in geometry.layers if x.kind != "attention"],
                "kv_bytes_per_token": geometry.kv_bytes_per_token,
                "refusal": geometry.refusal,
                "fingerprint": geometry.fingerprint,
                "policy": None if policy is None else policy.summary(geometry),
            }
        )

    per_token = geometry.kv_bytes_per_token
    output.print_facts(
        [
            ("model", geometry.name),
            ("architecture", geometry.architecture),
            ("layers", f"{geometry.n_layer}, {len(geometry.configurable)} take windows"),
            ("trained context", f"{geometry.n_ctx_train:,} tokens"),
            ("KV per token", f"{per_token:,} bytes (F16, layers that take windows)"),
            ("KV at that context", f"{per_token * geometry.n_ctx_train / MIB:,.1f} MiB with every head full"),
            ("policy", "none embedded" if policy is None else policy.summary(geometry)),
        ]
    )
    if geometry.refusal:
        output.console().print(f"no policy fits this model: {geometry.refusal}", markup=False)
    if geometry.layers:
        groups: dict[tuple, list[int]] = {}
        for x in geometry.layers:
            what = "takes windows" if x.kind == "attention" else x.reason
            groups.setdefault((x.kind, x.n_head, x.n_head_kv, x.head_dim_k, x.head_dim_v, what), []).append(x.layer)
        table = output.table("layers", "kind", "query heads", "KV heads", "K, V size", "")
        for (kind, n_head, n_head_kv, k, v, what), layers in groups.items():
            with_kv = kind in ("attention", "swa", "unsupported")
            shape = (str(n_head), str(n_head_kv), f"{k}, {v}") if with_kv else ("-", "-", "-")
            table.add_row(output.ranges(layers), kind, *shape, what.removeprefix("it "))
        output.console().print(table)
