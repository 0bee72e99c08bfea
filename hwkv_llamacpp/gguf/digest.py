"""SHA-256 of a model: of its file, or of all shards of a split one in their order."""

import functools
import hashlib
from pathlib import Path

from tqdm import tqdm

from .file import open_first_shard


@functools.cache
def of_model(path: str | Path, progress: bool = False) -> str:
    """64 hex digits. progress: a bar, if it takes more than two seconds."""
    found = hashlib.sha256()
    paths = shards(path)
    with tqdm(
        total=sum(p.stat().st_size for p in paths),
        unit="B",
        unit_scale=True,
        desc="hash",
        delay=2,
        disable=not progress,
    ) as bar:
        for shard in paths:
            with open(shard, "rb") as file:
                while block := file.read(1 << 24):
                    found.update(block)
                    bar.update(len(block))
    return found.hexdigest()


def shards(path: str | Path) -> list[Path]:
    """Paths of all files of a model."""
    file, paths = open_first_shard(path)
    with file:
        return [Path(p) for p in paths]
