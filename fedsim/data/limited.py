"""A process with limits of time and memory, in which chat templates run.

A template is a program of a stranger that comes with a model. This process has one child of its own
for them, which ends when it takes too long, and the next call starts another. A template is
sandboxed by Jinja besides; see `templates`.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from typing import Any, NoReturn

RENDER_S = 10.0  # of a template for one chat
MEMORY = 4 * 2**30  # bytes of addresses
MAIN = "from fedsim.data.limited import serve; serve()"


class LimitReached(Exception):
    """The child took too long or too much memory, or ended. The text names the limits."""


class Refused(Exception):
    """The child could not do it. The text is that of its error."""


_children: dict[int, subprocess.Popen[bytes]] = {}  # by process, for a fork starts its own
_lock = threading.Lock()


def call(name: str, *arguments: Any) -> Any:
    """Result of a function of `templates` in the child.

    Args:
      name: of the function.
      arguments: of the function, as JSON.
    Raises: LimitReached, Refused.
    """
    request = {"name": name, "arguments": arguments, "seconds": RENDER_S}
    with _lock:
        child, line = _children.pop(os.getpid(), None), b""
        if child is None or child.poll() is not None:
            child = _start()
        assert child.stdin is not None and child.stdout is not None, "pipes"
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(request).encode() + b"\n")
                child.stdin.flush()
                line = child.stdout.readline()
        finally:  # an answer that comes later would be that to another question
            if line.endswith(b"\n"):
                _children[os.getpid()] = child
            else:
                child.kill()
                child.communicate()
    if not line.endswith(b"\n"):
        raise LimitReached(f"{RENDER_S:.0f} s, or {MEMORY:,} bytes of memory")
    answer = json.loads(line)
    if "error" in answer:
        raise Refused(answer["error"])
    return answer["result"]


def _start() -> subprocess.Popen[bytes]:
    """Start a child. It ends when its input ends, so with this process."""
    places = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", MAIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": places},
        start_new_session=True,  # an interruption is for its parent
    )


def serve() -> NoReturn:
    """Main function of the child: answer requests, one a line, until the input ends."""
    from fedsim.data import templates  # which imports all of Jinja

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it computes
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        try:
            answer = {"result": getattr(templates, request["name"])(*request["arguments"])}
        except MemoryError:
            break  # its parent sees that it ended
        except ValueError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)
