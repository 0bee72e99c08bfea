"""StreamingLLM: the first tokens and a window for every KV head."""

import argparse

from ..gguf.geometry import ModelGeometry
from ..policy.policy import Policy
from .baseline import Baseline
from .budgets import of_window, sink_flag, window_flags
from .rows import configurable, hand_made


class Streaming(Baseline):
    name = "streaming"
    help = "StreamingLLM: the first tokens and a window for every KV head"
    details = "The method of Xiao et al. 2023 (arXiv 2309.17453)."
    example = "hwkv policy make streaming model.gguf --window 1024 --sink 4 -o policy.json"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        window_flags(parser)
        sink_flag(parser, 4)

    @classmethod
    def make(cls, geometry: ModelGeometry, args: argparse.Namespace) -> Policy:
        return of_window(args, geometry, lambda window: streaming(geometry, window, args.sink))


def streaming(geometry: ModelGeometry, window: int, n_sink: int = 4) -> Policy:
    """StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): every KV head keeps the first n_sink tokens and a window.

    window: in tokens; it counts the token itself.
    """
    rows = {layer.layer: [window] * layer.n_head_kv for layer in configurable(geometry)}
    return hand_made(geometry, rows, {"method": "streaming", "window": window}, n_sink)
