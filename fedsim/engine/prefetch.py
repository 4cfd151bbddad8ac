"""Reading while computing: the next chunk in a thread, the next step's pages while workers wait."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def ahead(read: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(item, read(item)) in order; the next item is read while the caller works on this one.

    Raises: what `read` raised, when it is that item's turn.
    """
    with ThreadPoolExecutor(1) as thread:
        last = None
        for item in items:
            following = (item, thread.submit(read, item))
            if last is not None:
                yield last[0], last[1].result()
            last = following
        if last is not None:
            yield last[0], last[1].result()


def touch(read: Callable[[], Any]) -> None:
    """Read in the background and forget: memory-mapped pages are there when they are needed. An
    error shows when the same is read again."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            read()

    threading.Thread(target=quietly, daemon=True).start()
