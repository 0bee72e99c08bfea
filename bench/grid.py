"""The models and policies of the experiments: those at hand, and the paper's for a GPU."""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hwkv_llamacpp import ModelGeometry, Policy
from hwkv_llamacpp.cli.main import main as hwkv
from hwkv_llamacpp.gguf import testmodels
from hwkv_llamacpp.runtime import native

ROOT = Path(__file__).resolve().parent.parent
RESULTS, POLICIES = Path(__file__).parent / "results", ROOT / "policies"


@dataclass(frozen=True)
class Model:
    """One model's grid."""

    path: object  # a path, or a function that fetches one
    policy: (
        Path | int
    )  # of a calibration; or by hand: every other KV head, counted through all layers, keeps that many tokens
    contexts: tuple
    memory_limit: str | None = None  # of the capacity scan; None: the device
    grid: int = 1024
    flags: tuple = ()

    def gguf(self):
        return self.path() if callable(self.path) else Path(self.path)

    def policy_file(self):
        """Path of the policy; one by hand is made in build/."""
        if isinstance(self.policy, Path):
            return self.policy
        model = self.gguf()
        rows, i = {}, 0
        for layer in ModelGeometry.from_gguf(model).configurable:
            rows[layer.layer] = tuple(self.policy if (i + head) % 2 else None for head in range(layer.n_head_kv))
            i += layer.n_head_kv
        folder = native.ROOT / "build" / "bench" / model.stem
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"half-{self.policy}.json"
        Policy(rows).save(path)
        return path


WINDOW = 512  # of the policy by hand for a model that comes with --model

# On a CPU, small contexts are slow enough; the finer grid of the scan makes up for small boundaries.
MODELS = {
    "mini-hybrid": Model(
        ROOT / "tests" / "data" / "mini-hybrid-f16.gguf",
        POLICIES / "mini-hybrid" / "leastkl.json",
        (2048, 8192),
        "48MiB",
        256,
        ("-ub", "128", "-t", "1"),
    ),
    "smollm2": Model(
        testmodels.smollm2,
        POLICIES / "SmolLM2-135M-Instruct" / "seqcalib.json",
        (2048, 8192, 32768),
        "224MiB",
        256,
        ("-ub", "128"),
    ),
    "gemma3": Model(
        testmodels.gemma3,
        POLICIES / "gemma-3-270m" / "seqcalib.json",
        (2048, 8192, 32768),
        "416MiB",
        256,
        ("-ub", "128"),
    ),
}

# The paper's: full offload on one GPU. Give the files with --model and a calibrated policy with --policy.
PAPER_CONTEXTS = (8192, 16384, 32768, 65536, 98304, 114688)
PAPER = {
    "qwen3.6-27b": Model("Qwen3.6-27B.gguf", 4096, PAPER_CONTEXTS, flags=("-ngl", "99")),
    "qwen3.5-9b": Model("Qwen3.5-9B.gguf", 4096, PAPER_CONTEXTS, flags=("-ngl", "99")),
}


def run(kind, doc):
    """The command of an experiment: `hwkv bench KIND` for each model that was asked for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        action="append",
        choices=[*MODELS, *PAPER],
        metavar="NAME",
        help=f"{', '.join([*MODELS, *PAPER])} (default: smollm2)",
    )
    parser.add_argument("--model", type=Path, metavar="GGUF", help="file to use instead of the named one")
    parser.add_argument("--policy", type=Path, metavar="P", help="policy to use instead")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=RESULTS / ("capacity.jsonl" if kind == "capacity" else "grid.jsonl"),
        metavar="RUN.jsonl",
        help="rows (default: %(default)s)",
    )
    args, more = parser.parse_known_args()  # the rest goes to hwkv bench
    code = 0
    for name in args.only or ["smollm2"]:
        model = {**MODELS, **PAPER}[name]
        if args.model:
            model = replace(model, path=args.model, policy=model.policy if name in PAPER else WINDOW)
        if name in PAPER and not args.model:
            parser.error(f"{name} needs --model: the file does not come with this project")
        words = [
            "bench",
            kind,
            str(model.gguf()),
            "--policy",
            str(args.policy or model.policy_file()),
            "-o",
            str(args.output),
            *model.flags,
        ]
        if kind == "capacity":
            words += ["--grid", str(model.grid)] + (
                ["--memory-limit", model.memory_limit] if model.memory_limit else []
            )
        elif not {"-c", "--ctx-size"} & set(more):
            words += ["-c", ",".join(map(str, model.contexts))]
        code = hwkv([*words, *more]) or code
    sys.exit(code)
