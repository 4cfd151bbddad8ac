"""The strategies of a clipped sum: their names, which to try, and the call of the chosen one.

A strategy changes the time and memory of a clipped sum, not its guarantee.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fedsim.clipping import ghost, scan
from fedsim.clipping.contribution import MODEL, Clip
from fedsim.clipping.layers import UnsupportedModel
from fedsim.clipping.packing import Buckets, Chunk
from fedsim.errors import expect

NAMES = ("scan", "direct", "ghost")  # the simpler ones first
UNITS_PER_CALL = 32
FEW_PARAMETERS = 20_000
MANY_PARAMETERS = 10_000_000  # a gradient of this size is far larger than a CPU's cache
NEAR_TIE = 1.02  # ratio of seconds within which the simpler strategy is chosen


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to compute clipped sums. Bits of a result depend on it."""

    name: str = "scan"
    """scan, direct or ghost."""
    rows: int = 8
    """Rows of one forward and backward pass. `scan` takes one unit at a time, `direct` several
    whole units if they fit, `ghost` whole units; fewer where `Buckets.side_by_side` says so."""

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """Parse NAME or NAME:ROWS.

        Raises: ConfigError: it names no strategy.
        """
        name, _, rows = text.partition(":")
        several = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}, with :ROWS (>= 1) if you like"
        expected = f"auto, or {several}"
        expect("strategy", text, name in NAMES, expected)
        expect("strategy", text, not rows or (rows.isdecimal() and int(rows) > 0), expected)
        return cls(name, int(rows)) if rows else cls(name)

    def __str__(self) -> str:
        return f"{self.name}:{self.rows}"

    def units_at_once(self, group: int) -> int:
        """Units of one forward and backward pass, for groups of `group` rows.

        More than one only on CPUs. On an NVIDIA H100 a unit's gradient was seen to depend on its
        position among several, in float32 in a tenth to a half of the checks and in bfloat16 in
        all, with deterministic kernels too. The texts of others determine the position, so they
        would change the unit's contribution.
        """
        return 1 if self.name == "scan" else max(1, self.rows // group)

    def of(self, chunk: Chunk) -> "Strategy":
        """Return the strategy with the rows of a pass that a chunk is made for."""
        return dataclasses.replace(self, rows=chunk.rows) if chunk.rows else self

    def shares_rows(self, group: int, buckets: Buckets | None) -> bool:
        """True if the texts of a unit share rows, on CPUs. `scan`, the oracle, takes them as they
        are."""
        return self.name == "direct" and group > 1 and buckets is not None and bool(buckets.shared)

    def units_per_call(self, group: int) -> int:
        """Units of one call of `clip_chunk`, a multiple of `units_at_once`.

        More units in a call need no more memory, and padding at the end costs no time.
        """
        at_once = self.units_at_once(group)
        return -(-UNITS_PER_CALL // at_once) * at_once

    def for_examples(self, group: int) -> "Strategy":
        """Return the strategy for units of one row with as many units at once as for groups."""
        return dataclasses.replace(self, rows=self.units_at_once(group))

    def splits_units(self, group: int) -> bool:
        """True if a unit's rows take several passes, each of which may have another length."""
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
    Raises: UnsupportedModel: the strategy does not support the model or local steps.
    """
    units, group = mask.shape
    loss_fn = jax.named_scope(MODEL)(loss_fn)
    at_once = min(units, strategy.units_at_once(group))
    if strategy.name != "ghost":
        options = {"rows_per_pass": strategy.rows, "buckets": buckets, "local": local}
        options["direct"] = strategy.name == "direct"
        options["side_by_side"] = 1 if local else at_once  # local steps are loops of other lengths
        return scan.clip_chunk(loss_fn, params, batch, mask, clip, total=total, **options)
    if local is not None:
        raise UnsupportedModel("only scan and direct take users' own steps")
    return ghost.clip_chunk(loss_fn, params, batch, mask, clip, side_by_side=at_once, total=total)


def candidates(
    group: int,
    num_parameters: int,
    *,
    on_cpu: bool = True,
    shared: bool = False,
    limited: bool = False,
) -> list[Strategy]:
    """List the strategies that are worth timing, for units of `group` rows.

    Args:
      shared: the texts of a unit share rows, of which a unit then has few.
      limited: passes have few tokens, see `Buckets.side_by_side`: at most 4 units.

    The simplest is first, because the others are compared with it; the rest is in the order of
    their promise, because trials end early in short runs.
    """
    # A CPU's cache holds the activations of few rows, but each pass adds up all parameters. An
    # accelerator needs many rows, but of one unit: see `Strategy.units_at_once`.
    passes = (4, 16) if on_cpu else (8, 32, 128)
    side_by_side = ((4, 8) if num_parameters > FEW_PARAMETERS else (8, 32)) if on_cpu else ()
    parts = {min(group, rows) for rows in passes}  # of one unit
    several = {rows for rows in side_by_side if rows >= 2 * group and (rows <= 4 or not limited)}
    one_by_one = [Strategy("scan", rows) for rows in sorted(parts)]
    if shared:
        return [one_by_one[0], Strategy("direct", 1), Strategy("direct", 4)]
    direct = [Strategy("direct", rows) for rows in (*sorted(several), *sorted(parts - several))]
    in_tiles = on_cpu and group == 1 and num_parameters >= MANY_PARAMETERS
    return [*one_by_one[:1], *[Strategy("ghost", 4)] * in_tiles, *direct, *one_by_one[1:]]


def choose(trials: Sequence[tuple[Strategy, float | None]]) -> Strategy:
    """Choose the fastest strategy; of near ties the first, so that timer noise does not decide.

    Args:
      trials: (strategy, seconds; None if it cannot be used).
    """
    timed = [(strategy, seconds) for strategy, seconds in trials if seconds is not None]
    if not timed:
        return min(
            (strategy for strategy, _ in trials), key=lambda s: (NAMES.index(s.name), s.rows)
        )
    best = min(seconds for _, seconds in timed)
    return next(strategy for strategy, seconds in timed if seconds <= best * NEAR_TIE)
