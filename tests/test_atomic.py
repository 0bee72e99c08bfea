"""Files are written whole or not at all, and what a killed process leaves is removed by the next."""

import os
import signal
import subprocess
import sys

import pytest

from hwkv_llamacpp import HwkvError
from hwkv_llamacpp.base import atomic
from hwkv_llamacpp.base.atomic import replacing

WRITER = """
import sys, time
from hwkv_llamacpp.base.atomic import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path):
    """A process that has written half of a file."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path / "other.gguf"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.wait()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(path):
    with replacing(path) as file:
        file.write(b"whole")


def test_what_a_killed_process_left_is_removed(writer, tmp_path, monkeypatch):
    (left,) = names(tmp_path)
    monkeypatch.setattr(atomic, "ABANDONED_AFTER", 0)
    write(tmp_path / "1")
    assert names(tmp_path) == [left, "1"]  # somebody is writing it
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    monkeypatch.setattr(atomic, "ABANDONED_AFTER", 60)
    write(tmp_path / "2")
    assert names(tmp_path) == [left, "1", "2"]  # so young that it may be about to be held
    monkeypatch.setattr(atomic, "ABANDONED_AFTER", 0)
    write(tmp_path / "3")
    assert names(tmp_path) == ["1", "2", "3"]


def test_files_and_links_being_written_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "ABANDONED_AFTER", 0)
    write(tmp_path / "shard")
    with (
        replacing(tmp_path / "a") as a,
        replacing(tmp_path / "b", link_to=tmp_path / "shard") as linked,
        replacing(tmp_path / "c") as c,
    ):
        assert linked is None
        a.write(b"a")
        c.write(b"c")
    assert names(tmp_path) == ["a", "b", "c", "shard"]
    assert os.path.samefile(tmp_path / "b", tmp_path / "shard")
    assert [(tmp_path / name).read_bytes() for name in "ac"] == [b"a", b"c"]


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "policy.json"
    with pytest.raises(HwkvError, match=f"{path}: exists already; --force replaces it"), replacing(path) as file:
        file.write(b"ours")
        path.write_bytes(b"theirs")
    assert path.read_bytes() == b"theirs" and names(tmp_path) == ["policy.json"]
    with replacing(path, overwrite=True) as file:
        file.write(b"ours")
    assert path.read_bytes() == b"ours"


def test_without_hard_links_a_file_takes_its_name_all_the_same(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path / "1")
    assert names(tmp_path) == ["1"] and (tmp_path / "1").read_bytes() == b"whole"


def test_a_link_to_a_symbolic_link_is_one_to_its_file(tmp_path):
    """Model caches keep symbolic links, relative ones."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "deep" / "snapshot").mkdir(parents=True)
    write(tmp_path / "blobs" / "x")
    (tmp_path / "deep" / "snapshot" / "m.gguf").symlink_to("../../blobs/x")
    with replacing(tmp_path / "linked", link_to=tmp_path / "deep" / "snapshot" / "m.gguf") as file:
        assert file is None
    assert not (tmp_path / "linked").is_symlink() and (tmp_path / "linked").samefile(tmp_path / "blobs" / "x")
