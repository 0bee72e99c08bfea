"""`hwkv serve`: says what the policy does, then becomes the real llama-server."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..base import options
from ..base.names import message
from ..errors import HwkvError
from ..gguf.embed import chosen_policy
from ..gguf.geometry import ModelGeometry
from ..plan import memory
from ..policy.footprint import CACHE_TYPES, predict
from ..runtime import native
from .arguments import policy_argument, policy_choice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs llama-server of the native build on a model. Everything after -- goes to llama-server as it is; "
        "stop it with Ctrl-C. It gets one slot (-np 1), where llama-server alone would make four, unless -np or "
        "--parallel stands after -- or LLAMA_ARG_N_PARALLEL is set: every slot keeps windows of its own."
    )
    parser.epilog = "example:\n  hwkv serve model-hwkv.gguf -- -c 32768 -ngl 99 --port 8080"
    parser.add_argument("model", metavar="MODEL", help="GGUF file")
    policy_argument(parser)
    parser.usage = "hwkv serve MODEL [--policy P] [-- FLAGS OF llama-server]"

    # argparse hands no words to a positional once an option came between: cut at the -- here
    parse = parser.parse_known_args

    def parse_before_dashes(words: list[str], namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        at = words.index("--") if "--" in words else len(words)
        namespace, unknown = parse(words[:at], namespace)
        if unknown:
            parser.error(f"{' '.join(unknown)}: flags of llama-server go after --, as in hwkv serve MODEL -- -c 32768")
        namespace.flags = words[at + 1 :]
        return namespace, unknown

    parser.parse_known_args = parse_before_dashes  # type: ignore[assignment,method-assign]


def run(args: argparse.Namespace) -> NoReturn:
    """Does not return: the process becomes llama-server."""
    given = {word.split("=")[0] for word in args.flags}
    if "--hwkv-policy" in given:
        raise HwkvError("give the policy as --policy, before the --")
    if wrong := given & {"-m", "--model", "-mu", "--model-url", "-hf", "-hfr", "--hf-repo"}:
        raise HwkvError(f"{min(wrong)}: give the model as MODEL, before the --")
    program = native.binary("llama-server")
    choice = policy_choice(args.policy)
    line, slots = describe(args.model, choice), []
    if not given & {"-np", "--parallel"} and "LLAMA_ARG_N_PARALLEL" not in os.environ:
        slots = ["-np", "1"]
        line += "; 1 slot (for more, give -np N after --)"
    if too_large := beyond_this_machine(args.model, choice, args.flags):
        raise HwkvError(too_large)
    print(message(line), file=sys.stderr, flush=True)
    os.execv(program, [str(program), "-m", args.model, "--hwkv-policy", choice or "embedded", *slots, *args.flags])


def describe(model: str, choice: str | None) -> str:
    """One line on the policy that `choice` means for a model, as `chosen_policy` takes it."""
    policy = chosen_policy(model, choice)
    if policy is None:
        return f"no policy{'' if choice else f' in {model}'}: full KV, as upstream"
    return f"policy {policy.summary(ModelGeometry.from_gguf(model))}"


def beyond_this_machine(model: str, choice: str | None, flags: Sequence[str]) -> str | None:
    """One sentence if the context that llama-server's flags and environment ask for cannot be held here, else None.

    What the sentence gives is the least: of one slot and the smallest rings. Devices of other machines are not known
    here, and flags that llama-server would not take are left to it.
    """
    if "--rpc" in flags or "LLAMA_ARG_RPC" in os.environ:
        return None
    n_ctx = _given(flags, ("-c", "--ctx-size"), "LLAMA_ARG_CTX_SIZE", "0")
    types = [
        _given(flags, (f"-ct{letter}", f"--cache-type-{letter}"), f"LLAMA_ARG_CACHE_TYPE_{letter.upper()}", "f16")
        for letter in "kv"
    ]
    if not (n_ctx.isascii() and n_ctx.isdigit() and 0 < int(n_ctx[:20]) <= options.MAX):
        return None
    if not set(types) <= set(CACHE_TYPES):
        return None
    geometry = ModelGeometry.from_gguf(model)
    policy = chosen_policy(model, choice)
    footprint = predict(geometry, policy, int(n_ctx), n_ubatch=1, type_k=types[0], type_v=types[1])
    return memory.beyond(f"-c {n_ctx} on {model}", footprint)


def _given(flags: Sequence[str], names: Sequence[str], variable: str, default: str) -> str:
    """What llama-server takes: the last such flag, else the environment's."""
    values = [value for name, value in zip(flags, flags[1:]) if name in names]
    return values[-1] if values else os.environ.get(variable, default)
