"""Which errors of the Hub's libraries are the network's or a server's: they may pass."""

import socket
import ssl
import sys

KINDS = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
LIBRARIES = {"httpx": "RequestError", "httpx2": "RequestError", "aiohttp": "ClientError"}


def may_pass(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, may be gone when the same is asked again."""
    while error is not None:
        status = _status(error)
        if status in (408, 429) or status >= 500:
            return True
        if not status and isinstance(error, (*KINDS, *_kinds_of_libraries())):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(error: BaseException) -> int:
    """What the server answered, in numbers; 0 where it did not."""
    response = getattr(error, "response", error)
    found = getattr(response, "status_code", None) or getattr(response, "status", None)
    return found if isinstance(found, int) else 0


def _kinds_of_libraries() -> list[type[BaseException]]:
    """Of those that were imported: others raised nothing."""
    return [
        getattr(sys.modules[name], kind) for name, kind in LIBRARIES.items() if name in sys.modules
    ]
