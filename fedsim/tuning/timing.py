"""How long gradients take on a run's workers, by the strategy that the run would choose."""

import itertools
import math
import time
from typing import Any

from fedsim.clipping import Strategy
from fedsim.config import EngineConfig
from fedsim.engine import Engine
from fedsim.training import strategy_for
from fedsim.tuning.norms import ANY_CLIP

TIMED_GRADIENTS = (16, 32, 128)  # of a step, to tell how long all of them take
TELLING_S = 1.0  # what takes longer needs no repetition with more


class UnitTimes:
    """Times of units, each number of rows measured once."""

    def __init__(self, config: EngineConfig, workers: Engine, params: Any):
        self._config, self._workers, self._params = config, workers, params
        self._known: dict[int, tuple[Strategy, float]] = {}

    def of(self, method: Any) -> tuple[Strategy, float]:
        """(The strategy for units like those that a method draws, seconds of a unit)."""
        rows = next(rows for rows in map(method.draw, itertools.count()) if len(rows))
        group = rows.shape[1]
        if group not in self._known:
            asked = (self._config, None, self._workers, self._params, method, ANY_CLIP)
            strategy, _ = strategy_for(*asked)
            self._known[group] = strategy, self._measured(rows, strategy)
        return self._known[group]

    def _measured(self, rows, strategy) -> float:
        """A part of a step is computed again and again, for the first one compiles; the last time
        counts."""
        seconds = math.nan
        for gradients in TIMED_GRADIENTS:
            rows_now = rows[: max(2, gradients // rows.shape[1])]
            start = time.perf_counter()
            self._workers.clipped_sum(self._params, rows_now, ANY_CLIP, strategy)
            elapsed = time.perf_counter() - start
            seconds = elapsed / len(rows_now)
            if elapsed > TELLING_S and gradients != TIMED_GRADIENTS[0]:
                break
        return seconds
