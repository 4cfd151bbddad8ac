"""Signals to stop: finish the step and save it, or clean up and end at once."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""Without SIGPIPE: Python ignores it, and a run whose reader has ended continues to train."""
REPEATED = signal.SIGXCPU  # sent by the kernel for every second above the limit of processor time
ECHO_S = 0.5  # `timeout` signals the process and its group: two signals at once are one
AGAIN_S = 0.01  # until a signal comes again that came while the garbage was collected

_asked, _depth = threading.Event(), 0


@contextmanager
def terminated() -> Iterator[None]:
    """Let each signal of STOPS raise KeyboardInterrupt in the block, so that it cleans up.

    Code that runs at that moment may swallow the KeyboardInterrupt or turn it into another
    exception, as imports do. So the signal is remembered: any exception that leaves the block then
    becomes KeyboardInterrupt; see `heed`.
    """
    global _depth

    def end() -> None:
        _asked.set()
        raise KeyboardInterrupt

    heed()
    _depth += 1
    try:
        with _at_first(end):
            yield
    except Exception:
        heed()
        raise
    finally:
        _depth -= 1
        if _depth == 0:
            _asked.clear()


def heed() -> None:
    """Raise KeyboardInterrupt if a stop signal arrived but its exception was swallowed."""
    if _asked.is_set():
        raise KeyboardInterrupt


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that a stop signal sets, so that the current step is finished and saved.

    To be entered after Ray has started, because Ray installs a handler of its own.
    """
    heed()
    stop = threading.Event()
    with _at_first(stop.set):
        heed()  # a signal may have come just before
        yield stop


@contextmanager
def _at_first(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at the first stop signal; a second one has its former effect.

    A signal that was ignored, as by `nohup`, stays ignored. One that arrives in a callback of the
    garbage collector, as JAX has one, comes again after it: an exception ends there without effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in STOPS}
    before = {n: then for n, then in handlers.items() if then not in (signal.SIG_IGN, None)}
    first = None

    def handle(number, frame):
        nonlocal first
        if _collects(frame):
            target = threading.get_ident(), number
            threading.Timer(AGAIN_S, signal.pthread_kill, target).start()
            return
        now = time.monotonic()
        if number == REPEATED:  # else its next repetition would kill the process while it saves
            signal.signal(number, signal.SIG_IGN)
        if first is None:
            first = now
            act()
        elif now - first > ECHO_S and number != REPEATED:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, then in before.items():
            if number != REPEATED or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, then)


def _collects(frame: FrameType | None) -> bool:
    """True if a callback of the garbage collector called what runs in `frame`."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in callbacks:
        frame = frame.f_back
    return frame is not None
