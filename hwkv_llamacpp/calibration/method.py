"""What a calibration method is, and which ones there are."""

import argparse
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from ..base import plugins
from ..gguf.geometry import ModelGeometry
from ..policy.budget import Budget
from ..runtime.context import Model
from . import selection
from .run import CalibrationRun, Record, Settings
from .trace import Trace

GROUP = "hwkv_llamacpp.methods"  # of entry points


class Method(ABC):
    """A way to find policies for a model: `hwkv calibrate --method NAME`. An object is the method with its options.

    One class in one file, registered as an entry point of the group "hwkv_llamacpp.methods". docs/extending.md shows
    how another package adds one.
    """

    name: ClassVar[str]  # as on the command line
    help: ClassVar[str]  # a sentence for `hwkv calibrate --help`

    @classmethod  # noqa: B027 (one without options is complete)
    def add_arguments(cls, group: argparse._ArgumentGroup) -> None:
        """Adds the method's own options. Their defaults are those of the method; None means not given."""

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Method":
        """The method with the options of the command line. HwkvError says what cannot be."""
        return cls()

    def identity(self, trace: Trace) -> dict[str, Any]:
        """What makes two runs the same run, besides the model, the trace and the Settings. Values are JSON's.

        A run folder is continued only under an equal identity. It stands in the provenance of every policy.
        """
        return {}

    @abstractmethod
    def run(self, run: CalibrationRun) -> list[Record]:
        """The records of all that was asked for. Finished work lies in run.folder, so that a stopped run goes on."""

    def calibrate(
        self,
        model: Model,
        geometry: ModelGeometry,
        trace: Trace,
        folder: str | Path,
        settings: Settings = Settings(),
        **more: Any,
    ) -> list[Record]:
        """run() in a folder. Arguments and errors as CalibrationRun's."""
        with CalibrationRun(self, model, geometry, trace, folder, settings, **more) as run:
            return self.run(run)

    def select(self, records: list[Record], geometry: ModelGeometry, budget: Budget) -> Record:
        """The record to deploy: the least distortion within the budget. HwkvError if none fits."""
        return selection.within(records, geometry, budget)


def methods() -> dict[str, type[Method]]:
    """{name: class} of all that are installed, ours and those of other packages."""
    return plugins.load(GROUP, Method)
