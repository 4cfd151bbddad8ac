"""The strategies of a clipped sum: their names, the rule that takes one, and the call of it.

A strategy changes the time and memory of a clipped sum, not its guarantee.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedsim.clipping import ghost, scan
from fedsim.clipping.contribution import MODEL, Clip
from fedsim.clipping.packing import Buckets, Chunk
from fedsim.errors import expect

NAMES = ("scan", "direct", "ghost")  # the simpler ones first
AUTO = "auto"
MANY_PARAMETERS = 10_000_000  # a gradient of this size is far larger than a CPU's cache
ROWS_ON_CPU = 4
TOKENS_OF_PASS = 4096  # on accelerators; 350 M parameters need 11 GiB for 32 rows of 128 tokens
GRADIENTS_OF_PASS = 2**32  # numbers, on accelerators: `direct` holds two gradients of each unit
LENGTH = 128  # of rows of unknown length


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
        """Parse NAME:ROWS, as `str` writes it.

        Raises: ConfigError: it names no strategy.
        """
        name, _, rows = text.partition(":")
        expected = f"{', '.join(NAMES[:-1])} or {NAMES[-1]}, then :ROWS (>= 1)"
        valid = name in NAMES and rows.isdecimal() and int(rows) > 0
        expect("strategy", text, valid, expected)
        return cls(name, int(rows))

    def __str__(self) -> str:
        return f"{self.name}:{self.rows}"

    def units_at_once(self, group: int) -> int:
        """Units of one forward and backward pass, for groups of `group` rows.

        On accelerators a contribution depends on its place among them: `Engine.keeps_places`.
        """
        return 1 if self.name == "scan" else max(1, self.rows // group)

    def of(self, chunk: Chunk) -> "Strategy":
        """Return the strategy with the rows of a pass that a chunk is made for."""
        return dataclasses.replace(self, rows=chunk.rows) if chunk.rows else self

    def shares_rows(self, group: int, buckets: Buckets | None) -> bool:
        """True if the texts of a unit share rows, on CPUs. `scan`, the oracle, takes them as they
        are."""
        return self.name == "direct" and group > 1 and buckets is not None and bool(buckets.shared)


def clip_chunk(
    loss_fn: scan.LossFn,
    params: Any,
    batch: Any,
    mask: jax.Array,
    clip: Clip,
    strategy: Strategy = Strategy(),  # noqa: B008 (frozen)
    *,
    buckets: Buckets | None = None,
    total: Any = None,
) -> scan.Sums:
    """sum over units of clip(mean over the unit's rows of grad loss, C), in whole numbers.

    Guarantees: a unit's contribution depends on (params, its rows, C) alone and has an L2 norm of
      at most `clip.sensitivity`, and the sum is exact; see contribution.py. A unit's gradient is
      complete before it is clipped; a unit without rows, or with a non-finite gradient, contributes
      exactly zero. With `clip.in_float32` only the last sentence holds.
    Args:
      loss_fn: (params, rows of a batch) -> one loss per row, float32 [rows]; rows are independent.
      params: tree of float32 arrays.
      batch: tree of arrays [units, group, ...].
      mask: bool [units, group], true where a row is real.
      clip: the clip norm C.
      strategy: how the sum is computed.
      buckets: lengths to which the rows of a pass may be trimmed: the least that holds all of them.
      total: a sum to add to; one holds at most `lattice_capacity` units. None: zeros.
    Returns: (sum, int32 tree like params, in units of `clip.unit`, or float32; norms [units];
      losses [units]; dropped bool [units]).
    Raises: UnsupportedModel: the strategy does not support the model.
    Source: Charles et al. 2024, Algorithms 1 and 2.
    """
    units, group = mask.shape
    loss_fn = jax.named_scope(MODEL)(loss_fn)
    if total is None:
        total = scan.zeros_like(params, jnp.float32 if clip.in_float32 else jnp.int32)
    add = ghost.clip_chunk
    if strategy.name != "ghost":
        how = {"rows_per_pass": strategy.rows, "direct": strategy.name == "direct"}
        add = functools.partial(scan.clip_chunk, **how, buckets=buckets)
    at_once = min(units, strategy.units_at_once(group))
    return add(loss_fn, params, batch, mask, clip, total=total, side_by_side=at_once)


def by_rule(
    name: str,
    rows: int | None,
    *,
    group: int,
    num_parameters: int,
    adapters: bool,
    on_cpu: bool,
    length: int | None,
    public_places: bool = False,
) -> Strategy:
    """Return the strategy of the settings, a function of public constants alone.

    Bits of a result depend on the strategy, so neither a timer nor a cache may choose it. From
    MANY_PARAMETERS on, a gradient does not fit into a CPU's cache, and `ghost`, which forms it a
    tile at a time, takes less time and memory than `direct` for units of one row.
    Args:
      name: of the strategy, or AUTO.
      rows: rows of a pass; None: by the rule.
      group: rows of a unit.
      num_parameters: number of trained parameters.
      adapters: they are adapters on a model that is not trained.
      on_cpu: workers compute on CPUs.
      length: tokens of the longest row; None: unknown.
      public_places: no text decides which units are drawn, nor their order.
    """
    if name == AUTO:
        large = on_cpu and group == 1 and not adapters and num_parameters >= MANY_PARAMETERS
        name = "ghost" if large else "direct"
    if rows is None:
        # A CPU's cache holds the activations of few rows. An accelerator needs many; they are of
        # one unit where places are not public: see `Strategy.units_at_once`.
        fit = max(1, TOKENS_OF_PASS // (length or LENGTH))
        if name == "direct":
            fit = min(fit, group * max(1, GRADIENTS_OF_PASS // num_parameters))
        rows = ROWS_ON_CPU if on_cpu else fit if public_places else min(group, fit)
    return Strategy(name, rows)
