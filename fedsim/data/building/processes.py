"""Runs a function over parts of the data, in this process or in several, and says how far it is."""

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

from fedsim.errors import DataError, Interrupted
from fedsim.files import TOO_MANY_FILES, write_json

PROGRESS_EVERY_S = 5.0
SMALL_BYTES = 32 * 2**20  # less is done before processes have started

_kept: list[Any] = []
_counter: Any = None  # rows done in all workers of a stage; a worker's own, set when it starts


def kept_for_a_build(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a path, with its last result kept until the build ends: the files of the next
    one may have the same names."""
    cached = functools.lru_cache(1)(function)
    _kept.append(cached)
    return cached


def _forget() -> None:
    for cached in _kept:
        cached.cache_clear()


class Pool:
    """Workers for one build; a context manager. Results come in the order of the items.

    The functions take an item and report(rows), must be importable, and are called with
    `report=`; what they return does not depend on which process they ran in.
    """

    def __init__(self, num_workers: int | None, say: Callable[[str], None] | None):
        """num_workers: processes; default: one per CPU that this process may use."""
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self._say = say
        self._executor: ProcessPoolExecutor | None = None
        self._total = _Context().Value("q", 0)

    def __enter__(self) -> "Pool":
        _forget()
        return self

    def __exit__(self, error, *_) -> None:
        _forget()
        if self._executor is not None:
            if error is not None:  # nobody wants what the workers are at, which may take long
                for process in list(self._executor._processes.values()):
                    process.terminate()
            self._executor.shutdown(cancel_futures=True)

    def grow(self, num_bytes: int) -> None:
        """Starts the processes if that much data is worth it."""
        if self.num_workers > 1 and num_bytes > SMALL_BYTES and self._executor is None:
            self._executor = ProcessPoolExecutor(
                self.num_workers, _Context(), _start_worker, (self._total, os.getpid())
            )

    def map(
        self, call: Callable[..., Any], items: Sequence[Any], stage: str = "", total: int = 0
    ) -> list[Any]:
        """[call(item, report=...) for item in items]; the first error stops the rest.

        Args: stage, total: what progress says, and the rows in all; without them it says nothing.
        Raises: Interrupted: a worker was killed, and whatever `call` raises.
        """
        meter = Meter(stage, total, self._say)
        if self._executor is None:
            found = [call(item, report=meter.add) for item in items]
        else:
            self._total.value = 0
            found = self._gather(self._executor, call, items, meter)
        meter.end()
        return found

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

    That may be a script that builds a data set where it is imported, or standard input, which
    cannot be read again. What runs here is fedsim's.
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
    """Says how far a stage is, not too often."""

    def __init__(self, stage: str, total: int, say: Callable[[str], None] | None):
        self.stage, self.total = stage, total
        self.say = say if stage else None
        self.done, self.started = 0, time.monotonic()
        self.said_at = self.started

    def add(self, rows: int) -> None:
        self.show(self.done + rows)

    def show(self, done: int) -> None:
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
    """A worker whose parent was killed would wait for work forever."""

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
    """Raises: DataError: `out` is there and not an empty directory."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"out={out}: already exists, expected a new directory")


@contextmanager
def staging(out: Path, wait: bool) -> Iterator[Path]:
    """A directory to work in; its subdirectory `out` becomes `out` at the end.

    Args: wait: for another process that is building `out`, instead of raising.
    Raises: DataError: `out` exists, cannot be made, or is being built by another process.
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
        check_absent(out)  # who held it before may have finished
        yield directory
        os.rename(directory / "out", out)
    except BaseException as error:
        if not _goes_on(error):
            shutil.rmtree(directory, ignore_errors=True)
        elif not any(directory.iterdir()):  # it was not begun
            directory.rmdir()
        raise
    else:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


def _goes_on(error: BaseException) -> bool:
    """Whether the same command goes on from what is there."""
    if isinstance(error, OSError):
        return error.errno in TOO_MANY_FILES
    return isinstance(error, KeyboardInterrupt | Interrupted)


def _hold(directory: Path, wait: bool) -> int:
    """A descriptor of the directory, made if need be, whose lock this process holds."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
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
    """Keeps what an interrupted build of the same plan left in `directory`, or clears it.

    Returns: whether there was such a build.
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
