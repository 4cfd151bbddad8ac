"""Stopping between two steps, or at once and tidily, when the system asks for it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""SIGPIPE is none of them: Python ignores it, and a run whose reader has gone trains on."""
REPEATED = signal.SIGXCPU  # by the kernel, for every second above the limit of processor time
ECHO_S = 0.5  # `timeout` sends its signal to the process and to its group: twice, at once


_asked, _depth = threading.Event(), 0


@contextmanager
def terminated() -> Iterator[None]:
    """Each of STOPS ends what is inside as Ctrl-C does, so that it clears up behind itself.

    What runs at that moment may eat the KeyboardInterrupt, as callbacks of the garbage collector
    and half of an import do, or make another exception of it: so it is remembered, and an exception
    that leaves what is inside is taken for the KeyboardInterrupt; see `heed`.
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
    """Raises KeyboardInterrupt if a signal to stop has come that was meant to raise it."""
    if _asked.is_set():
        raise KeyboardInterrupt


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that a signal to stop sets, so that the step under way is finished and saved.

    Installed after Ray has started: Ray puts its own handler in place.
    """
    heed()
    stop = threading.Event()
    with _at_first(stop.set):
        heed()  # or it came just now
        yield stop


@contextmanager
def _at_first(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` at the first signal to stop; a second one does what it would have done without
    this. One that was ignored, as by `nohup`, stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in STOPS}
    before = {n: then for n, then in handlers.items() if then not in (signal.SIG_IGN, None)}
    first = None

    def handle(number, frame):
        nonlocal first
        now = time.monotonic()
        if number == REPEATED:  # it would end what is left to be done, once this is over, too
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
