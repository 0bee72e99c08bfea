"""Sizes of memory: units as GNU's tools have them, everywhere the same, and shown as they were given."""

import argparse

import pytest

from hwkv_llamacpp.base import sizes

GIB = 2**30


@pytest.mark.parametrize(
    "text, n_bytes",
    [
        ("24GiB", 24 * GIB),
        ("24G", 24 * GIB),
        ("24gib", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("1.5 g", 3 * GIB // 2),
        ("512M", 512 * 2**20),
        ("300MiB", 300 * 2**20),
        ("1TB", 10**12),
        ("100KiB", 102400),
        ("1500000000", 1500000000),
        ("1048576B", 2**20),
    ],
)
def test_units(text, n_bytes):
    assert sizes.parse(text) == n_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1e9", "4XB", "4 G iB", "many", "0", "24", "8192", "0GiB", "1048575", "٣GiB"]
)
def test_what_cannot_be_meant(text):
    with pytest.raises(argparse.ArgumentTypeError, match="such as 24GiB"):
        sizes.parse(text)


@pytest.mark.parametrize("text", ["24 GiB", "24 GB", "1.5 GiB", "300 MiB", "3 TiB", "100 KiB"])
def test_shown_as_given(text):
    assert sizes.show(sizes.parse(text)) == text
    assert sizes.show(2**30 + 1) == "1,073,741,825 bytes"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "M", "--memory"),
        ("bench", "capacity", "M", "-o", "R", "--memory-limit"),
        ("policy", "make", "uniform", "M", "--budget-bytes"),
        ("policy", "make", "random", "M", "--budget-bytes"),
    ],
)
def test_every_command_reads_them_alike(hwkv, words):
    code, _, err = hwkv(*words, "24")
    assert code == 2 and "'24' is 24 bytes: a size with its unit expected, such as 24GiB, 24GB or 300MiB" in err
