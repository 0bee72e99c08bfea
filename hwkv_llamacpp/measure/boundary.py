"""The search for the largest context that a memory holds: a pair that was measured, last success and first failure, one
grid step apart.

Only running out of memory is a failure here. A timeout or a crash of another kind is tried once more, and then ends the
search without a boundary. Both contexts of the pair are repeated three times; if the repetitions disagree, the pair is
not confirmed, and nothing is picked.
"""

from collections.abc import Generator
from dataclasses import dataclass

from .rows import Step

GRID = 1024
N_CONFIRM = 3
OK, OUT_OF_MEMORY = "ok", "out of memory"


@dataclass(frozen=True)
class Boundary:
    last_success: int | None  # n_ctx; None: nothing fits
    first_failure: int | None  # n_ctx; None: everything up to the highest fits
    confirmed: bool
    note: str


def scan(
    highest: int, guess: int, grid: int = GRID, lowest: int = 1
) -> Generator[tuple[int, Step, int], str, Boundary]:
    """A generator: yields (n_ctx, step, round) to try, wants the status of each sent back, and returns a Boundary.

    highest, lowest: the n_ctx to stay within, with a multiple of the grid between them; guess: where the search starts.
    """
    least, most = -(-lowest // grid), highest // grid
    low, high = least - 1, most + 1  # in grid steps: the last that fits and the first that does not, as far as known
    fits = failed = False

    def attempt(n: int) -> Generator[tuple[int, Step, int], str, str]:
        for round_ in range(2):
            status = yield n * grid, "search", round_
            if status in (OK, OUT_OF_MEMORY):
                break
        return status

    n, stride = min(max(least, guess // grid), most), 1
    while high - low > 1:
        status = yield from attempt(n)
        if status == OK:
            low, fits = n, True
        elif status == OUT_OF_MEMORY:
            high, failed = n, True
        else:
            return Boundary(
                low * grid if fits else None,
                high * grid if failed else None,
                False,
                f"no boundary: at {n * grid:,} tokens the server ended otherwise, twice ({status})",
            )
        if fits and failed:
            n = (low + high) // 2
        else:
            n = min(low + stride, most) if fits else max(high - stride, least)
            stride *= 2
    if not fits:
        return Boundary(None, high * grid, False, f"not even {high * grid:,} tokens fit")
    if not failed:
        return Boundary(low * grid, None, False, f"no failure up to {low * grid:,} tokens, the highest tried")

    good, bad = [], []
    for round_ in range(N_CONFIRM):
        good.append((yield low * grid, "last success", round_))
        bad.append((yield high * grid, "first failure", round_))
    n_good, n_bad = good.count(OK), bad.count(OUT_OF_MEMORY)
    confirmed = n_good == n_bad == N_CONFIRM
    note = (
        f"{n_good} of {N_CONFIRM} runs succeeded at {low * grid:,} tokens,"
        f" {n_bad} of {N_CONFIRM} ran out of memory at {high * grid:,}"
    )
    return Boundary(low * grid, high * grid, confirmed, note if confirmed else f"not confirmed: {note}")
