"""A process with limits of time and memory, in which files of strangers are tried and run.

A chat template is a program, and a tokenizer.json can make its library loop, abort or fill memory.
Both come with models of strangers. This process has one child of its own for them. A child that
takes too long is killed, and the next call starts another. A template is sandboxed by Jinja
besides; see `templates`.
"""

import contextlib
import functools
import json
import os
import resource
import selectors
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

RENDER_S, LOAD_S = 10.0, 60.0  # of a template for one chat; of a tokenizer
MEMORY = 4 * 2**30  # bytes of addresses: the largest tokenizers take a third
START_S = 60.0
LARGEST = 2**28  # bytes of an answer
PROBES = ("Aüが 12 \t\n<b>", "a" * 200, " " * 200, "(" * 50 + "word, word; " * 20)
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
MAIN = "from fedsim.data.limited import serve; serve()"


class LimitReached(Exception):
    """The child took too long or too much memory, or ended. The text names the limits."""


class Refused(Exception):
    """The child could not do it. The text is that of its error, or the name of the error's class if
    it has none."""


class _Child:
    """The process. It ends when its input ends, so with this process."""

    def __init__(self):
        places = os.pathsep.join(path for path in sys.path if path)
        self.pid = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", MAIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": places},
            start_new_session=True,  # an interruption is for its parent
        )
        self._answers = selectors.DefaultSelector()
        assert self.process.stdout is not None, "a pipe"
        self._answers.register(self.process.stdout, selectors.EVENT_READ)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Answer of the child. Raises: LimitReached."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None, "pipes"
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps({**request, "seconds": seconds}).encode() + b"\n")
            stdin.flush()
        until, answer = time.monotonic() + seconds, b""
        while not answer.endswith(b"\n"):
            left = until - time.monotonic()
            ready = self._answers.select(left) if left > 0 else []
            part = os.read(stdout.fileno(), 2**20) if ready else b""
            answer += part
            if not part or len(answer) > LARGEST:
                raise LimitReached(f"{seconds:.0f} s, or {MEMORY:,} bytes of memory")
        return json.loads(answer)

    def end(self) -> None:
        """Kill the process."""
        self._answers.close()
        self.process.kill()
        self.process.communicate()


_child: _Child | None = None
_lock = threading.Lock()


def call(name: str, *arguments: Any, seconds: float) -> Any:
    """Result of a function of ACTIONS in the child.

    Args:
      arguments: of the function, as JSON.
      seconds: limit of time.
    Raises: LimitReached, Refused.
    """
    global _child
    with _lock:
        if _child is None or _child.pid != os.getpid() or _child.process.poll() is not None:
            _child = _Child()
            _ask({"name": "ready", "arguments": []}, START_S)
        answer = _ask({"name": name, "arguments": arguments}, seconds)
    if "error" in answer:
        raise Refused(answer["error"])
    return answer["result"]


def _ask(request: dict[str, Any], seconds: float) -> dict[str, Any]:
    global _child
    assert _child is not None, "started"
    try:
        return _child.ask(request, seconds)
    except BaseException:  # an answer that comes later would be that to another question
        _child.end()
        _child = None
        raise


def serve() -> NoReturn:
    """Main function of the child: answer requests, one a line, until the input ends."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Should its parent be killed meanwhile, nobody else would end a loop.
        spent = time.process_time() + request["seconds"] + 1
        if most == resource.RLIM_INFINITY or spent < most:
            resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + 1, most))
        try:
            answer = {"result": ACTIONS[request["name"]](*request["arguments"])}
        except MemoryError:
            break  # its parent sees that it ended
        except BaseException as error:  # a panic of a library in Rust is no Exception
            answer = {"error": str(error)[:1000] or type(error).__name__}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)


@functools.lru_cache(4)
def _compiled(source: str, day: str) -> Any:
    from fedsim.data import templates

    return templates.compiled(source, day)


def _render(source: str, day: str, variables: dict[str, Any], begins: str, ends: str) -> str:
    return _compiled(source, day).render(variables, begins, ends)


def _load_tokenizer(file: str) -> None:
    """Do with a tokenizer.json what `fedsim.data.tokenizer` does with it, on texts of all kinds."""
    import tokenizers

    inner = tokenizers.Tokenizer.from_file(file)
    inner.no_padding()
    inner.no_truncation()
    inner.get_vocab(with_added_tokens=True)
    inner.encode_special_tokens = True
    added = [token["content"] for token in json.loads(inner.to_str())["added_tokens"]]
    for text in (*PROBES, *added):
        inner.decode(inner.encode(text, add_special_tokens=False).ids)
    if inner.normalizer is not None:
        inner.normalizer.normalize_str(PROBES[0])


ACTIONS = {
    "ready": lambda: None,
    "compile": lambda source, day: bool(_compiled(source, day)),
    "render": _render,
    "load_tokenizer": _load_tokenizer,
}
