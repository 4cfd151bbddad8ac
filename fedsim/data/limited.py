"""A process with limits of time and memory, in which files of strangers are tried and run.

A chat template is a program, and a tokenizer.json can make its library loop, abort or fill memory.
Both come with models of strangers. This process has one child of its own for them, which ends when
it takes too long, and the next call starts another. A template is sandboxed by Jinja besides; see
`templates`.
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

RENDER_S, LOAD_S = 10.0, 60.0  # of a template for one chat; of a tokenizer
MEMORY = 4 * 2**30  # bytes of addresses: the largest tokenizers take a third
PROBES = ("Aüが 12 \t\n<b>", "a" * 200, " " * 200, "(" * 50 + "word, word; " * 20)
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
MAIN = "from fedsim.data.limited import serve; serve()"


class LimitReached(Exception):
    """The child took too long or too much memory, or ended. The text names the limits."""


class Refused(Exception):
    """The child could not do it. The text is that of its error."""


_children: dict[int, subprocess.Popen[bytes]] = {}  # by process, for a fork starts its own
_lock = threading.Lock()


def call(name: str, *arguments: Any) -> Any:
    """Result of a function of `templates`, or of `load_tokenizer`, in the child. Arguments and
    result are JSON. Raises: LimitReached, Refused.
    """
    seconds = LOAD_S if name == load_tokenizer.__name__ else RENDER_S
    request = {"name": name, "arguments": arguments, "seconds": seconds}
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
        raise LimitReached(f"{seconds:.0f} s, or {MEMORY:,} bytes of memory")
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
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": places},
        start_new_session=True,  # an interruption is for its parent
    )


def serve() -> NoReturn:
    """Main function of the child: answer requests, one a line, until the input ends."""
    from fedsim.data import templates  # which imports all of Jinja

    known = templates.check, templates.render, load_tokenizer
    functions = {function.__name__: function for function in known}
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
            answer = {"result": functions[request["name"]](*request["arguments"])}
        except MemoryError:
            break  # its parent sees that it ended
        except ValueError as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)


def load_tokenizer(content: str) -> None:
    """Do with a tokenizer.json what `fedsim.data.tokenizer` does, on texts of all kinds.

    Raises: ValueError: the library refuses it.
    """
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_str(content)
        inner.no_padding()
        inner.no_truncation()
        inner.get_vocab(with_added_tokens=True)
        inner.encode("a")
        saved = inner.to_str()
        inner = tokenizers.Tokenizer.from_str(saved)  # which some that load do not come through
        inner.encode_special_tokens = True
        added = [token["content"] for token in json.loads(saved)["added_tokens"]]
        for text in (*PROBES, *added):
            inner.decode(inner.encode(text, add_special_tokens=False).ids)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        raise ValueError(str(error)[:1000] or type(error).__name__) from None
