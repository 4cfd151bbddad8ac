"""Which strategy computes a clipped sum, and with how many rows at a time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fedsim.clipping import bookkeeping, scan, vmap
from fedsim.clipping.clip import Clip
from fedsim.config import expect

NAMES = ("scan", "bookkeeping", "vmap")  # the simpler ones first
SCAN_UNITS_PER_CHUNK = 16  # costs no memory: units are worked through one by one
FEW_PARAMETERS = 20_000
NEAR_TIE = 1.03


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How clipped sums are computed. The choice is part of a result's bits."""

    name: str = "scan"
    rows: int = 8
    """Rows of one forward and backward pass. `bookkeeping` and `vmap` take whole units."""

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """From NAME or NAME:ROWS. Raises ConfigError."""
        name, _, rows = text.partition(":")
        expected = "auto, or scan, bookkeeping or vmap, with :ROWS (>= 1) if you like"
        expect("strategy", text, name in NAMES, expected)
        expect("strategy", text, not rows or (rows.isdecimal() and int(rows) > 0), expected)
        return cls(name, int(rows)) if rows else cls(name)

    def __str__(self) -> str:
        return f"{self.name}:{self.rows}"

    def units_per_chunk(self, group: int) -> int:
        """Units of one call of `clipped_sum`, for groups of so many rows."""
        return SCAN_UNITS_PER_CHUNK if self.name == "scan" else max(1, self.rows // group)

    def splits_units(self, group: int) -> bool:
        """Whether a unit's rows are seen in several passes, each of which may have its length."""
        return self.name == "scan" and self.rows < group


def clipped_sum(
    loss_fn: scan.LossFn,
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    strategy: Strategy = Strategy(),  # noqa: B008 (frozen)
    *,
    buckets: scan.Buckets | None = None,
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """sum over units of clip(mean over the unit's rows of grad loss, C), by any strategy.

    Arguments, results and guarantees are those of `scan.clipped_sum`.
    """
    if strategy.name == "scan":
        options = {"rows_per_pass": strategy.rows, "buckets": buckets}
        return scan.clipped_sum(loss_fn, params, batch, mask, clip, **options)
    module = {"bookkeeping": bookkeeping, "vmap": vmap}[strategy.name]
    return module.clipped_sum(loss_fn, params, batch, mask, clip)


def candidates(group: int, num_parameters: int) -> list[Strategy]:
    """What is worth timing for units of so many rows, the simplest first."""
    if num_parameters <= FEW_PARAMETERS:
        return [Strategy("scan", min(group, 8)), Strategy("vmap", max(group, 64))]
    passes = sorted({min(group, rows) for rows in (4, 16)})
    several = [Strategy("bookkeeping", rows) for rows in (4, 16) if group <= rows]
    return [Strategy("scan", rows) for rows in passes] + several


def choose(found: Sequence[tuple[Strategy, float | None]]) -> Strategy:
    """The fastest; of near ties the first, so that a timer's noise does not decide.

    Args: found: (strategy, seconds, or None where it does not fit into memory).
    """
    timed = [(strategy, seconds) for strategy, seconds in found if seconds is not None]
    if not timed:
        return min((strategy for strategy, _ in found), key=lambda s: (NAMES.index(s.name), s.rows))
    best = min(seconds for _, seconds in timed)
    return next(strategy for strategy, seconds in timed if seconds <= best * NEAR_TIE)
