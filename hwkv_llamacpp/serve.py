"""`hwkv serve`: says what the policy does, then becomes the real llama-server."""

import os
import sys

from . import native
from .embed import read_policy
from .errors import HwkvError
from .geometry import ModelGeometry
from .policy import Policy

ENVIRONMENT = "LLAMA_ARG_HWKV_POLICY"


def add_arguments(parser):
    parser.description = ("Runs llama-server of the native build on a model. Everything after -- goes to llama-server as it is; "
                          "stop it with Ctrl-C.")
    parser.epilog = "example:\n  hwkv serve model-hwkv.gguf -- -c 32768 -ngl 99 --port 8080"
    parser.add_argument("model", metavar="MODEL", help="GGUF file")
    parser.add_argument("--policy", metavar="P", help='policy JSON, a GGUF with an embedded policy, "embedded" or "off" '
                                                      f"(default: ${ENVIRONMENT}, else the policy in MODEL, if it has one)")
    parser.usage = "hwkv serve MODEL [--policy P] [-- FLAGS OF llama-server]"

    # argparse hands no words to a positional once an option came between: cut at the -- here
    parse = parser.parse_known_args

    def parse_before_dashes(words, namespace=None):
        at = words.index("--") if "--" in words else len(words)
        namespace, unknown = parse(words[:at], namespace)
        namespace.flags = words[at + 1:]
        return namespace, unknown

    parser.parse_known_args = parse_before_dashes


def run(args):
    """Does not return: the process becomes llama-server."""
    if any(word.split("=")[0] == "--hwkv-policy" for word in args.flags):
        raise HwkvError("give the policy as --policy, before the --")
    program = native.binary("llama-server")
    choice = args.policy or os.environ.get(ENVIRONMENT) or "embedded"
    print(describe(args.model, choice), file=sys.stderr, flush=True)
    os.execv(program, [str(program), "-m", args.model, "--hwkv-policy", choice, *args.flags])


def describe(model, choice):
    """One line on the policy that `choice` means for a model. HwkvError where it cannot be read or does not fit."""
    geometry = ModelGeometry.from_gguf(model)
    if choice == "off":
        return "no policy: full KV, as upstream"
    policy = read_policy(model) if choice == "embedded" else Policy.load(choice)
    if policy is None:
        return f"no policy in {model}: full KV, as upstream"
    policy.check(geometry, model if choice == "embedded" else choice)
    return policy.summary(geometry)
