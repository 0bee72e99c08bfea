"""What a baseline is, and which ones there are."""

import argparse
from abc import ABC, abstractmethod
from typing import ClassVar

from ..base import plugins
from ..gguf.geometry import ModelGeometry
from ..policy.policy import Policy

GROUP = "hwkv_llamacpp.policies"  # of entry points


class Baseline(ABC):
    """A policy that is made without running the model: `hwkv policy make NAME MODEL`.

    One class in one file, registered as an entry point of the group "hwkv_llamacpp.policies".
    """

    name: ClassVar[str]  # as on the command line
    help: ClassVar[str]  # one line, as `hwkv policy make --help` lists it
    details: ClassVar[str] = ""  # more, for `hwkv policy make NAME --help`
    example: ClassVar[str] = ""  # a command line

    @classmethod  # noqa: B027 (one without options is complete)
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the baseline's own options; MODEL, -o and --force are there."""

    @classmethod
    @abstractmethod
    def make(cls, geometry: ModelGeometry, args: argparse.Namespace) -> Policy:
        """The policy for a model of this geometry. HwkvError says what cannot be."""


def baselines() -> dict[str, type[Baseline]]:
    """{name: class} of all that are installed, ours and those of other packages."""
    return plugins.load(GROUP, Baseline)
