"""Cells computed side by side, one process and one thread for each; rows are kept as they come."""

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from experiments.benchmarks.common import processor
from experiments.harness.records import came_from
from experiments.harness.rows import Cell, Row, append


def compute(
    train: Callable[[Cell, Any], Row],
    cells: Iterable[Cell],
    settings: Any,
    file: Path,
    minutes: float,
    processes: int | None = None,
) -> None:
    """Append the row of each cell to `file`, in the order in which they end, with the processor.

    Where one fails, those that are under way still end and are kept, and no other is begun.

    Args:
      train: a function of a module, of a cell and the settings.
      minutes: after these no cell is begun.
      processes: None: as many as there are cores.
    Raises: what the first cell that failed raised.
    """
    todo, ends = iter(cells), time.monotonic() + 60 * minutes
    count = (processes or os.cpu_count() or 1) if minutes else 0
    first = list(itertools.islice(todo, count))
    if not first:
        return
    with _pool(len(first)) as pool:
        under_way: set[Future] = {pool.submit(train, cell, settings) for cell in first}
        faults: list[BaseException] = []
        while under_way:
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in ended:
                if (fault := future.exception()) is not None:
                    faults.append(fault)
                    print(f"failed, so no other is begun: {fault!r}", flush=True)
                    continue
                row = {**future.result(), "cpu": processor()}  # on which bits depend
                append(file, [row])
                print(*row.values(), flush=True)
                if faults or time.monotonic() >= ends:
                    continue
                if (cell := next(todo, None)) is not None:
                    under_way.add(pool.submit(train, cell, settings))
    if faults:
        raise faults[0]


def side_by_side(function: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
    """function(job) of each job, in their order, as many at a time as there are cores.

    Args:
      function: of a module.
    """
    with _pool(os.cpu_count() or 1) as pool:
        return list(pool.map(function, jobs))


def _pool(processes: int) -> ProcessPoolExecutor:
    os.environ |= {"NPROC": "1", "JAX_PLATFORMS": "cpu"}
    spawn = multiprocessing.get_context("spawn")
    # The commit is that of when it begins, whatever is committed while it computes.
    return ProcessPoolExecutor(processes, mp_context=spawn, initializer=came_from)
