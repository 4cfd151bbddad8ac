"""Worker processes of a build: a function of each part of the data, and lines of progress."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fedsim.cgroups import cpus
from fedsim.errors import Interrupted
from fedsim.signals import raise_if_stopped

Say = Callable[[str], None] | None
"""Function that shows a line to the user."""
PROGRESS_EVERY_S = 5.0
SMALL_BYTES = 32 * 2**20  # less is processed faster than processes start


class Pool:
    """Worker processes of one build. A context manager.

    Functions and items must be importable by another process, and results must not depend on the
    process that they are computed in.

    Args:
      num_workers: number of processes. Default: one per CPU that this process may use.
      say: shows a line of progress.
    """

    def __init__(self, num_workers: int | None, say: Say):
        self.num_workers = num_workers or cpus()
        self._say = say
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def grow(self, num_bytes: float) -> None:
        """Let `map` use processes if `num_bytes` of data are worth it."""
        if self.num_workers > 1 and num_bytes > SMALL_BYTES and self._executor is None:
            # A fork would copy the locks of JAX's and Arrow's threads as they are.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.num_workers, context, _start_worker)

    def map(self, call: Callable[[Any], Any], items: Sequence[Any], stage: str = "") -> list[Any]:
        """[call(item) for item in items]. The first error stops the rest.

        Args:
          stage: name of the stage in lines of progress; "" shows none.
        Raises:
          Interrupted: a worker was killed. Any error that `call` raises.
        """
        count = progress_of(stage, len(items), "parts", self._say if stage else None)
        run = map if self._executor is None else self._executor.map
        results = []
        try:
            for result in run(call, items):
                results.append(result)
                count(1)
        except BrokenProcessPool:
            raise Interrupted(
                f"num_workers={self.num_workers}: a worker process ended, expected enough memory "
                "(fewer workers need less), and `if __name__ == '__main__':` around the work of a "
                "script, which each worker imports"
            ) from None
        return results


def progress_of(stage: str, total: int, unit: str, say: Say) -> Callable[[int], None]:
    """Function that adds to what is done of a stage, and shows it every PROGRESS_EVERY_S seconds.

    It raises KeyboardInterrupt if a stop signal came.
    """
    started = said_at = time.monotonic()
    done = 0

    def count(number: int) -> None:
        nonlocal done, said_at
        raise_if_stopped()
        done += number
        now = time.monotonic()
        if say and (done == total or now - said_at > PROGRESS_EVERY_S):
            said_at = now
            left = (now - started) * (total / done - 1)
            rest = f", {left:.0f} s left" if done < total else ""
            say(f"{stage} {done:,} of {total:,} {unit}{rest}")

    return count


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    import pyarrow as pa

    pa.set_cpu_count(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "of a worker"
    parent.join()
    os._exit(1)
