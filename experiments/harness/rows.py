"""What experiments do with rows of losses: group them, pair algorithms, know the seeds' noise."""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Row = dict[str, Any]
Rows = list[Row]
CAME = ("loss", "loss_std", "loss_before", "validation_loss", "seeds", "by_seed", "inside_grid")
"""Of a row, what came of its cell."""
ERRORS = 3.0
"""Standard errors beyond which a difference counts: figures ask about dozens of them."""
EQUAL_ERRORS = 2.0
"""Of tests of equivalence."""


def kept(file: Path) -> Rows:
    """The rows that were kept so far, a JSON object in each line; a line that was cut off when a
    process was killed is left out."""
    rows = []
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else [], 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            print(f"{file}: line {number} was cut off and is left out", flush=True)
    return rows


def append(file: Path, rows: Iterable[Row]) -> None:
    """Keep rows, durably; after a line that was cut off, too."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    whole = not file.exists() or file.read_bytes()[-1:] in (b"", b"\n")
    with file.open("a") as out:
        out.write(text if whole else f"\n{text}")
        out.flush()
        os.fsync(out.fileno())


def by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, Rows]:
    """Rows by what `key` says of them, in order of appearance."""
    found: dict[Any, Rows] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def paired(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """(ELS's row, ULS's) of cells that differ in nothing else."""
    own = {"algorithm", "group_size", "local_steps", "local_learning_rate"}
    own |= {"learning_rate", "clip_norm", *CAME}
    found = by(rows, lambda row: tuple(v for n, v in row.items() if n not in own))
    each = [{row["algorithm"]: row for row in same} for same in found.values()]
    return [(row["els"], row["uls"]) for row in each]


def middle(rows: Sequence[Row]) -> Row:
    """The row at the middle epsilon and budget."""
    epsilons, budgets = (sorted({row[key] for row in rows}) for key in ("epsilon", "budget"))
    at = (epsilons[(len(epsilons) - 1) // 2], budgets[len(budgets) // 2])
    return next(row for row in rows if (row["epsilon"], row["budget"]) == at)


def over_seeds(losses: Sequence[float]) -> Row:
    """Mean, deviation and number of what the seeds of a cell came to, and each by itself, in the
    seeds' order (`by_seed`); no number of any is infinite, and says nothing of the seeds' noise."""
    if not np.isfinite(losses).all():
        return {"loss": float("inf"), "loss_std": 0.0, "seeds": len(losses), "by_seed": None}
    spread = float(np.std(losses, ddof=1)) if len(losses) > 1 else 0.0
    each = " ".join(f"{loss:.6g}" for loss in losses)
    came = {"loss": float(np.mean(losses)), "loss_std": spread, "seeds": len(losses)}
    return {**came, "by_seed": each}


@dataclasses.dataclass(frozen=True, order=True)
class StandardError:
    """A standard error whose variance was estimated with so many degrees of freedom."""

    size: float
    freedom: int

    __array_ufunc__ = None  # a NumPy number times one is one

    def __mul__(self, factor: float) -> "StandardError":
        return StandardError(self.size * float(factor), self.freedom)

    __rmul__ = __mul__

    def __truediv__(self, factor: float) -> "StandardError":
        return self * (1 / factor)

    def __float__(self) -> float:
        return self.size

    def __format__(self, how: str) -> str:
        return format(self.size, how)

    def times(self, count: float) -> float:
        """As far as so many standard errors would go, were the variance known: by Student's t of
        the same probability."""
        if self.size == 0 or not self.freedom:
            return self.size * math.inf if self.size else 0.0
        return float(stats.t.isf(stats.norm.sf(count), self.freedom)) * self.size


def seed_error(rows: Sequence[Row]) -> StandardError:
    """Standard error over seeds of a cell's mean loss; the variance is pooled over all cells, since
    two seeds alone say little about it."""
    variance, seeds = np.mean([row["loss_std"] ** 2 for row in rows]), [r["seeds"] for r in rows]
    return StandardError(math.sqrt(variance / min(seeds)), sum(seeds) - len(seeds))


class Quantity(NamedTuple):
    """What a claim is about, by the rows."""

    values: Sequence[float] | np.ndarray
    """One for each setting; none: nothing is judged."""
    numbers: str
    """What is said of it beside a verdict, with the fields that `claims.judged` knows and these."""
    errors: Sequence[Any] = (0.0,)
    """A standard error for each value, or one for all: numbers or `StandardError`s; 0: exact."""
    unit: Any = 1.0
    """What the rule's bound is a multiple of, for each value or for all."""
    fields: Mapping[str, Any] = MappingProxyType({})
