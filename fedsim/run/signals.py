"""Stopping a run between two steps when the system asks for it."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, so that it clears up behind itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM or SIGINT sets, so that the step under way is finished and saved.

    A second signal does what it would have done without this. Installed after Ray has started: Ray
    puts its own handler in place.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def first(*_):
        stop.set()
        restore()

    def restore():
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, first)
    try:
        yield stop
    finally:
        restore()
