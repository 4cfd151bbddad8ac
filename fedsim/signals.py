"""Signals to stop: finish the step and save it, or clean up and end within seconds.

A handler raises nothing: its exception could land where it is lost, as in the callback of a weak
reference or of the garbage collector, or could leave a library's C code half-way. It sets a flag,
and loops look at the flag with `raise_if_stopped`. In the command line a thread also reads the
signals, because Python runs no handler while the main thread is in C code, such as a compilation.
"""

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Without SIGPIPE: Python ignores it, and a run whose reader has ended continues to train."""
ECHO_S = 0.5  # `timeout` signals the process and its group: two signals at once are one
GRACE_S = 4.0  # for a command without steps to look at the flag and to clean up

_asked = threading.Event()  # a signal came that no steps answer
_steps = threading.Event()  # steps are being taken, or one was finished for a signal
_unfinished: set[Path] = set()
_end: ContextVar[threading.Event | None] = ContextVar("end", default=None)  # of `ended_by`


class Stopped(Exception):
    """The event of `ended_by` was set."""


def raise_if_stopped() -> None:
    """Raise KeyboardInterrupt if a stop signal came. For loops, where nothing is half done."""
    if _asked.is_set():
        raise KeyboardInterrupt
    if (end := _end.get()) is not None and end.is_set():
        raise Stopped


@contextmanager
def ended_by(stop: threading.Event) -> Iterator[None]:
    """End the block, which may be left undone, at the first `raise_if_stopped` after `stop`."""
    token = _end.set(stop)
    try:
        with suppress(Stopped):
            yield
    finally:
        _end.reset(token)


@contextmanager
def terminated(end: Callable[[], object]) -> Iterator[None]:
    """Let a stop signal end the block with KeyboardInterrupt, from `raise_if_stopped` or its end.

    Args:
      end: ends the process at once. A thread calls it at a second signal, and GRACE_S after the
        first unless a step is being finished.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reader, end), daemon=True)
    thread.start()
    try:
        with _at_first(_asked.set, again=False):
            yield
            raise_if_stopped()
    except Exception:
        raise_if_stopped()  # such as an error of what the signal also ended
        raise
    finally:
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")
        thread.join()
        os.close(reader)
        os.close(writer)
        _asked.clear()
        _steps.clear()


@contextmanager
def stop_signals(say: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Yield an event that a stop signal sets, so that the current step is finished and saved.

    To be entered after Ray has started, because Ray installs a handler of its own.

    Args:
      say: called at the signal.
    """
    stop = threading.Event()

    def begin_to_stop() -> None:
        stop.set()
        with suppress(RuntimeError):  # the signal came amid a write to the same stream
            say()

    _steps.set()
    try:
        with _at_first(begin_to_stop, again=True):
            raise_if_stopped()  # a signal may have come just before
            yield stop
    finally:
        if not stop.is_set():
            _steps.clear()


@contextmanager
def removed_at_end(directory: Path) -> Iterator[None]:
    """Remove a directory also if a signal ends the process at once in the block."""
    _unfinished.add(directory)
    try:
        yield
    finally:
        _unfinished.discard(directory)


@contextmanager
def _at_first(act: Callable[[], None], *, again: bool) -> Iterator[None]:
    """Call `act` at the first stop signal. If `again`, a second one has its former effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in STOPS}
    # A signal that was ignored, as by `nohup`, stays ignored.
    before = {n: then for n, then in handlers.items() if then not in (signal.SIG_IGN, None)}
    first = math.inf

    def handle(number, frame):
        nonlocal first
        if first == math.inf:
            first = time.monotonic()
            act()
        elif again and time.monotonic() - first > ECHO_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, then in before.items():
            signal.signal(number, then)


def _watch(reader: int, end: Callable[[], object]) -> None:
    """Read the numbers of signals from a pipe, until a zero; call `end` when it is time."""

    def end_now() -> None:
        for directory in [*_unfinished]:
            shutil.rmtree(directory, ignore_errors=True)
        end()

    timer = threading.Timer(GRACE_S, lambda: _steps.is_set() or end_now())
    timer.daemon, first = True, math.inf
    while number := os.read(reader, 1)[0]:
        if number in STOPS and first == math.inf:
            first = time.monotonic()
            timer.start()
        elif number in STOPS and time.monotonic() - first > ECHO_S:
            end_now()
    timer.cancel()
