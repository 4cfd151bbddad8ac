"""Which strategy computes a clipped sum, and with how many rows at a time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fedsim.clipping import ghost, scan
from fedsim.clipping.contribution import MODEL, Clip
from fedsim.clipping.layers import UnsupportedModel
from fedsim.clipping.packing import Buckets
from fedsim.errors import expect

NAMES = ("scan", "direct", "ghost")  # the simpler ones first
UNITS_PER_CALL = 32
FEW_PARAMETERS = 20_000
MANY_PARAMETERS = 10_000_000  # whose gradient is far from fitting into a processor's cache
NEAR_TIE = 1.02


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How clipped sums are computed. The choice is part of a result's bits."""

    name: str = "scan"
    rows: int = 8
    """Rows of one forward and backward pass. `scan` takes one unit at a time, `direct` several
    whole ones where they fit, `ghost` whole ones."""

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """The strategy that NAME or NAME:ROWS names. Raises ConfigError: there is none."""
        name, _, rows = text.partition(":")
        several = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}, with :ROWS (>= 1) if you like"
        expected = f"auto, or {several}"
        expect("strategy", text, name in NAMES, expected)
        expect("strategy", text, not rows or (rows.isdecimal() and int(rows) > 0), expected)
        return cls(name, int(rows)) if rows else cls(name)

    def __str__(self) -> str:
        return f"{self.name}:{self.rows}"

    def units_at_once(self, group: int) -> int:
        """Units of one forward and backward pass, for groups of so many rows.

        More than one are for processors. On an NVIDIA H100 a unit's gradient was seen to depend on
        its place among several, in float32 in a tenth to a half of the looks and in bfloat16 in
        all, with deterministic kernels too: others' texts, by which places are given, would change
        what it contributes.
        """
        return 1 if self.name == "scan" else max(1, self.rows // group)

    def units_per_call(self, group: int) -> int:
        """A good number for one call of `clip_chunk`: it costs no memory, and units that are
        padding at the end cost no time."""
        at_once = self.units_at_once(group)
        return -(-UNITS_PER_CALL // at_once) * at_once

    def for_examples(self, group: int) -> "Strategy":
        """The same for units of one row, as many at once as there are of groups of so many."""
        return dataclasses.replace(self, rows=self.units_at_once(group))

    def splits_units(self, group: int) -> bool:
        """Whether a unit's rows are seen in several passes, each of which may have its length."""
        return self.name in ("scan", "direct") and self.rows < group


def clip_chunk(
    loss_fn: scan.LossFn,
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    strategy: Strategy = Strategy(),  # noqa: B008 (frozen)
    *,
    buckets: Buckets | None = None,
    local: scan.LocalSteps | None = None,
    total: Any = None,
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """sum over units of clip(mean over the unit's rows of grad loss, C), by any strategy.

    Arguments, results and guarantees are those of `scan.clip_chunk`.
    Raises: UnsupportedModel: the strategy cannot do it.
    """
    units, group = mask.shape
    loss_fn = jax.named_scope(MODEL)(loss_fn)
    at_once = min(units, strategy.units_at_once(group))
    if strategy.name != "ghost":
        options = {"rows_per_pass": strategy.rows, "buckets": buckets, "local": local}
        options["direct"] = strategy.name == "direct"
        options["side_by_side"] = 1 if local else at_once  # own steps are loops of various lengths
        return scan.clip_chunk(loss_fn, params, batch, mask, clip, total=total, **options)
    if local is not None:
        raise UnsupportedModel("only scan and direct take users' own steps")
    return ghost.clip_chunk(loss_fn, params, batch, mask, clip, side_by_side=at_once, total=total)


def candidates(group: int, num_parameters: int, *, on_cpu: bool = True) -> list[Strategy]:
    """What is worth timing for units of so many rows. First the simplest, which others are held
    against, then in the order of their promise: trials end early in short runs."""
    # A processor's cache holds the activations of few rows, but each pass adds up all parameters.
    # An accelerator wants to be filled, but with rows of one unit: see `Strategy.units_at_once`.
    passes = (4, 16) if on_cpu else (8, 32, 128)
    side_by_side = ((4, 8) if num_parameters > FEW_PARAMETERS else (8, 32)) if on_cpu else ()
    parts = {min(group, rows) for rows in passes}  # of one unit
    several = {rows for rows in side_by_side if rows >= 2 * group}
    one_by_one = [Strategy("scan", rows) for rows in sorted(parts)]
    direct = [Strategy("direct", rows) for rows in (*sorted(several), *sorted(parts - several))]
    in_tiles = on_cpu and group == 1 and num_parameters >= MANY_PARAMETERS
    return [*one_by_one[:1], *[Strategy("ghost", 4)] * in_tiles, *direct, *one_by_one[1:]]


def choose(found: Sequence[tuple[Strategy, float | None]]) -> Strategy:
    """The fastest; of near ties the first, so that a timer's noise does not decide.

    Args: found: (strategy, seconds, or None where it does not fit into memory).
    """
    timed = [(strategy, seconds) for strategy, seconds in found if seconds is not None]
    if not timed:
        return min((strategy for strategy, _ in found), key=lambda s: (NAMES.index(s.name), s.rows))
    best = min(seconds for _, seconds in timed)
    return next(strategy for strategy, seconds in timed if seconds <= best * NEAR_TIE)
