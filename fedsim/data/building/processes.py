"""Worker processes and working directory of a build.

Pool runs a function over parts of the data, in this process or in several, and reports progress.

A build works in a hidden directory beside `out`, which one process locks. `out` is complete or
absent. An invalid input or a full disk leaves nothing. A build that was interrupted or killed, lost
a worker or the network, or could open no more files, leaves its finished parts, from which the same
build resumes.
"""

import fcntl
import functools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from fedsim.cgroups import cpus
from fedsim.errors import DataError, Interrupted
from fedsim.files import TOO_MANY_FILES, keep_private, sync_directory, write_json
from fedsim.signals import heed

PROGRESS_EVERY_S = 5.0
SMALL_BYTES = 32 * 2**20  # less is processed faster than processes start

_kept: list[Any] = []
_counter: Any = None  # processed rows of all workers in a stage; set when a worker starts


def kept_for_a_build(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the last result of a function of a path until the build ends.

    The files of the next build may have the same names.
    """
    cached = functools.lru_cache(1)(function)
    _kept.append(cached)
    return cached


def _forget() -> None:
    for cached in _kept:
        cached.cache_clear()


class Pool:
    """Worker processes of one build. A context manager.

    Functions must be importable; they take an item, and `report`, which they call with numbers of
    processed rows. Their results must not depend on the process that they run in.
    """

    def __init__(self, num_workers: int | None, say: Callable[[str], None] | None):
        """Prepare the pool. No process is started.

        Args:
          num_workers: number of processes. Default: one per CPU that this process may use.
          say: shows a line of progress.
        """
        self.num_workers = num_workers or cpus()
        self._say = say
        self._executor: ProcessPoolExecutor | None = None
        self._total = _Context().Value("q", 0)

    def __enter__(self) -> "Pool":
        _forget()
        return self

    def __exit__(self, error, *_) -> None:
        _forget()
        if self._executor is not None:
            if error is not None:  # the results are not needed, and may take long
                for process in list(self._executor._processes.values()):
                    process.terminate()
            self._executor.shutdown(cancel_futures=True)

    def grow(self, num_bytes: float) -> None:
        """Start the processes if `num_bytes` of data are worth it; inf: it is not known."""
        if self.num_workers > 1 and num_bytes > SMALL_BYTES and self._executor is None:
            self._executor = ProcessPoolExecutor(
                self.num_workers, _Context(), _start_worker, (self._total, os.getpid())
            )

    def map(
        self, call: Callable[..., Any], items: Sequence[Any], stage: str = "", total: int = 0
    ) -> list[Any]:
        """[call(item, report=...) for item in items]. The first error stops the rest.

        Args:
          stage: name of the stage in lines of progress; "" shows none.
          total: number of rows of all items.
        Returns:
          Results in the order of the items.
        Raises:
          Interrupted: a worker was killed. Any error that `call` raises.
        """
        meter = Meter(stage, total, self._say)
        if self._executor is None:
            results = [call(item, report=meter.add) for item in items]
        else:
            self._total.value = 0
            results = self._gather(self._executor, call, items, meter)
        meter.end()
        return results

    def _gather(
        self,
        executor: ProcessPoolExecutor,
        call: Callable[..., Any],
        items: Sequence[Any],
        meter: "Meter",
    ) -> list[Any]:
        futures: list[Future] = []
        try:
            futures += (executor.submit(_run, call, item) for item in items)
            left = set(futures)
            while left:
                done, left = wait(left, PROGRESS_EVERY_S / 5, FIRST_EXCEPTION)
                for future in done:
                    future.result()
                meter.show(self._total.value)
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise Interrupted(
                f"num_workers={self.num_workers}: a worker process was killed, expected it to have "
                "enough memory; fewer workers need less"
            ) from None
        except BaseException:
            for future in futures:
                future.cancel()
            raise


class _Process(SpawnProcess):
    """A fresh process that does not import the program's main module.

    The main module may be a script that builds a data set when it is imported, or standard input,
    which cannot be read again. All functions that run here are fedsim's.
    """

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)  # pyright: ignore
        finally:
            sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


class Meter:
    """Progress of a stage, shown every PROGRESS_EVERY_S seconds and at the end."""

    def __init__(self, stage: str, total: int, say: Callable[[str], None] | None):
        self.stage, self.total = stage, total
        self.say = say if stage else None
        self.done, self.started = 0, time.monotonic()
        self.said_at = self.started

    def add(self, rows: int) -> None:
        """Count rows that were processed since the last call."""
        self.show(self.done + rows)

    def show(self, done: int) -> None:
        """Set the number of processed rows, and show it if the last line is old enough.

        Raises: KeyboardInterrupt: a stop signal came.
        """
        heed()
        now = time.monotonic()
        self.done = done
        if self.say and done and now - self.said_at > PROGRESS_EVERY_S:
            self.said_at = now
            rate = done / (now - self.started)
            self.say(
                f"{self.stage} {done:,} of {self.total:,} rows, {rate:,.0f}/s, "
                f"{max(self.total - done, 0) / rate:.0f} s left"
            )

    def end(self) -> None:
        """Show that all rows are processed."""
        if self.say:
            self.say(f"{self.stage} {self.total:,} of {self.total:,} rows")


def _start_worker(total: Any, parent: int) -> None:
    global _counter
    _counter = total
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    import pyarrow as pa

    pa.set_cpu_count(1)
    _end_with_parent(parent)


def _end_with_parent(parent: int) -> None:
    """End this worker when its parent is gone: it would wait for work forever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run(call: Callable[..., Any], item: Any) -> Any:
    return call(item, report=_report)


def _report(rows: int) -> None:
    with _counter.get_lock():
        _counter.value += rows


PLAN = "plan.json"


def check_absent(out: Path) -> None:
    """Check that a directory can become `out`: it does not exist or is an empty directory.

    Raises: DataError: it exists, or is a link or where another disk is mounted, which cannot be
      replaced.
    """
    if out.is_symlink() or os.path.ismount(out):
        raise DataError(f"out={out}: expected a new directory, not a link or a mounted one")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"out={out}: already exists, expected a new directory")


@contextmanager
def staging(out: Path, wait: bool) -> Iterator[Path]:
    """Lock a working directory; its subdirectory `out` becomes `out` at the end.

    Args:
      wait: wait for another process that builds `out` instead of raising an error.
    Raises:
      DataError: `out` exists, cannot be made, or is being built by another process.
    """
    check_absent(out)
    directory = out.parent / f".{out.name}.building"
    try:
        descriptor = _hold(directory, wait)
    except BlockingIOError:
        raise DataError.of("out", out, "a directory that no other process is building") from None
    except OSError as error:
        raise DataError.of("out", out, f"a place to write to ({error})") from None
    try:
        check_absent(out)  # the process that held the lock may have finished
        yield directory
        keep_private(directory / "out")  # texts of people
        os.rename(directory / "out", out)
        sync_directory(out.parent)
    except BaseException as error:
        if not _goes_on(error):
            shutil.rmtree(directory, ignore_errors=True)
        elif not any(directory.iterdir()):  # nothing was written
            directory.rmdir()
        raise
    else:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _goes_on(error: BaseException) -> bool:
    """True if the same build can resume after this error."""
    if isinstance(error, OSError):
        return error.errno in TOO_MANY_FILES
    return isinstance(error, KeyboardInterrupt | Interrupted)


def _hold(directory: Path, wait: bool) -> int:
    """Make the directory if necessary, lock it, and return its file descriptor."""
    while True:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fchmod(descriptor, 0o700)  # its parts are texts of people
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(descriptor), os.stat(directory)):
                return descriptor
        except FileNotFoundError:
            pass  # its holder finished and removed it in between
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def resume(directory: Path, plan: dict[str, Any]) -> bool:
    """Keep the files of an interrupted build with the same plan in `directory`, or clear it.

    Returns:
      True if there was such a build.
    """
    file = directory / PLAN
    plan = json.loads(json.dumps(plan))
    same = file.exists() and json.loads(file.read_text()) == plan
    if same:
        for temporary in directory.rglob("*.tmp"):
            temporary.unlink(missing_ok=True)
        return True
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_json(file, plan)
    return False
