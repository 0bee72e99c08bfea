"""Sizes of memory, read and shown as GNU's tools do: GiB and G are powers of 1024, GB of 1000."""

import argparse
import re

UNITS = {
    name + suffix: base**power for power, name in enumerate("KMGT", 1) for suffix, base in (("iB", 1024), ("B", 1000))
}
LEAST_BARE = 2**20  # bytes; a smaller number without a unit is a unit forgotten


def parse(text: str) -> int:
    """Bytes of "24GiB", "24G" (both 24 * 1024^3), "1.5 GB" (1.5 * 1000^3) or a plain number of bytes.

    For argparse: ArgumentTypeError says what is wrong.
    """
    match = re.fullmatch(
        r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*(?:([KMGT])(i?B)?|B)?\s*", text, re.ASCII | re.IGNORECASE
    )
    if not match:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a size such as 24GiB, 24GB or 300MiB")
    number, letter, suffix = match.groups()
    unit = UNITS[letter.upper() + ("B" if suffix in ("B", "b") else "iB")] if letter else 1
    n_bytes = int(float(number) * unit)
    if n_bytes < (1 if letter else LEAST_BARE):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is {n_bytes} bytes: a size with its unit expected, such as 24GiB, 24GB or 300MiB"
        )
    return n_bytes


def show(n_bytes: int) -> str:
    """The shortest text that parse() reads as exactly so many bytes, such as "24 GiB", "24 GB" or "1.5 GiB"."""
    texts = [
        f"{n_bytes / unit:.3f}".rstrip("0").rstrip(".") + f" {name}"
        for name, unit in UNITS.items()
        if unit <= n_bytes < 10_000 * unit
    ]
    exact = [text for text in reversed(texts) if parse(text) == n_bytes]
    return min(exact, key=len, default=f"{n_bytes:,} bytes")
