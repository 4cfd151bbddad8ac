"""A chat with a model in a terminal, in the form that its chat template gives a chat.

What a person types is text, as in training: nobody can type a special token. Replies have the same
privacy as the model: the run's epsilon.
"""

import io
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from fedsim.config import Sampling
from fedsim.data import (
    ASSISTANT,
    USER,
    ChatTokenizer,
    Message,
    Tokenizer,
    template_in,
)
from fedsim.engine import expect_usable_jax
from fedsim.errors import BadChat, ConfigError, brief, expect, printable
from fedsim.files import expand_home
from fedsim.generate import continued, model_to_generate
from fedsim.models import Pretrained, key_of

EXIT, PROMPT = "/exit", "> "
INCOMPLETE = "\ufffd"  # the end of a text whose last character is not complete
LEAST_SHARE = 4  # a reply has at least this part of the model's length, if max_tokens asks for it


class Conversation:
    """A chat with a model that grows by a message and a reply at a time."""

    def __init__(
        self,
        model: Pretrained,
        *,
        system: str = "",
        temperature: float = 1.0,
        max_tokens: int = 256,
        seed: int = 0,
    ):
        """Begin a chat.

        Args:
          system: the system's message; empty: none.
          temperature: divides the logits; 0 takes the likeliest token.
          max_tokens: most tokens of a reply.
          seed: of the draws.
        Raises:
          ConfigError: a number is out of range, or the template has no role for the system.
          DataError: the template is none.
        """
        expect("max_tokens", max_tokens, max_tokens >= 1, ">= 1")
        assert model.tokenizer is not None
        self._model, self._tokenizer = model, Tokenizer.load(model.tokenizer)
        template = template_in(model.files, self._tokenizer)
        there = "a model with a chat template; fedsim generate continues a text"
        expect("model", model.tokenizer.parent, template is not None, there)
        self._chats = ChatTokenizer(self._tokenizer, template)
        self._system = [Message("system", system)] if system else []
        try:
            self._chats.encode_prompt([*self._system, Message(USER, "a")])
            end = self._chats.end_of_turn()
        except BadChat as error:
            raise ConfigError.of("system", brief(system), f"another, or none ({error})") from None
        self._ends = self._tokenizer.end_ids | ({end} if end is not None else set())
        self._how, self._max_tokens = Sampling(temperature), max_tokens
        self._key = key_of(seed)
        self.turns: list[Message] = []
        self.forgotten = 0
        """Number of first turns that no longer fit into the model's length."""

    def reply(self, message: str) -> Generator[str, None, None]:
        """Yield the reply to a message, piece by piece; pieces may be empty.

        The reply ends early if the iterator is closed. What was said stays in the chat.
        Raises: ConfigError: the message is too long for the model.
        """
        self.turns.append(Message(USER, message))
        try:
            ids, count = self._prompt()
        except ConfigError:
            self.turns.pop()
            raise
        said, shown = [], ""
        key = jax.random.fold_in(self._key, len(self.turns) + self.forgotten)
        how = (self._how, key, self._ends)
        try:
            for (token,) in continued(self._model, ids, count, *how, at_once=1):
                if token in self._ends:
                    break
                said.append(token)
                text = self._tokenizer.decode(said)
                if text.endswith(INCOMPLETE):
                    yield ""
                    continue
                yield text[len(shown) :]
                shown = text
        finally:
            self.turns.append(Message(ASSISTANT, self._tokenizer.decode(said)))

    def _prompt(self) -> tuple[list[int], int]:
        """(token ids of the chat, most tokens of the reply). Forgets the oldest turns if needed."""
        longest = self._model.config.table
        room = min(self._max_tokens, longest // LEAST_SHARE)
        turns = list(self.turns)
        while True:
            try:
                ids = self._chats.encode_prompt([*self._system, *turns])
            except BadChat as error:
                raise ConfigError(f"message: {error}", field="message") from None
            if len(ids) + room <= longest or len(turns) == 1:
                break
            del turns[:2]
        expect("message", f"{len(ids)} tokens", len(ids) < longest, f"fewer than {longest} tokens")
        self.forgotten += len(self.turns) - len(turns)
        self.turns = turns
        return ids.tolist(), min(self._max_tokens, longest - len(ids))


def chat(source: str, *, silent: bool = False, **how: Any) -> dict[str, Any]:
    """Chat with a model: messages from stdin, one a line, and replies to stdout.

    Ctrl-C ends a reply, Ctrl-D or /exit the chat.
    Args:
      source: the directory of a run or of a model, or hf:NAME.
      silent: write nothing to stdout.
      how: further arguments of `Conversation`.
    Returns: the fields of --json: the messages of the chat.
    Raises: ConfigError: there is no such model, or it has no chat template.
    """
    expect_usable_jax()
    model = model_to_generate(expand_home("model", source))
    conversation = Conversation(model, **how)
    said: list[Message] = []
    with _interrupts() as stop:
        for text in _messages(stop, silent):
            before = conversation.forgotten
            try:
                _show(conversation.reply(text), stop, silent)
            except ConfigError as error:
                print(error, file=sys.stderr)
                continue
            said += conversation.turns[-2:]
            if conversation.forgotten > before:
                note = f"(the first {conversation.forgotten} turns are forgotten: the model's "
                print(f"{note}length is {model.config.table} tokens)", file=sys.stderr)
    return {"messages": [{"role": each.role, "content": each.content} for each in said]}


def _show(reply: Generator[str, None, None], stop: threading.Event, silent: bool) -> None:
    """Write the pieces of a reply as they come, until Ctrl-C."""
    safe = sys.stdout.isatty()
    for piece in reply:
        if not silent:
            print(printable(piece, "\n\t") if safe else piece, end="", flush=True)
        if stop.is_set():
            reply.close()
    if not silent:
        print(flush=True)


def _messages(stop: threading.Event, silent: bool) -> Iterator[str]:
    """Lines that a person types or a program sends, until the end, without empty ones."""
    typed = sys.stdin.isatty() and sys.stdout.isatty() and not silent
    if typed:
        import readline  # noqa: F401, so that lines can be edited
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while True:
        stop.clear()
        try:
            with _raising():
                line = input(PROMPT) if typed else sys.stdin.readline()
        except EOFError:
            print()
            return
        except _Interrupt:  # not KeyboardInterrupt, which other signals raise
            if not typed:
                raise KeyboardInterrupt from None
            print()
            continue
        if not (typed or line) or line.strip() == EXIT:
            return
        if line.strip():
            yield line.rstrip("\n")


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets, so that no computation is interrupted in between."""
    stop = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class _Interrupt(Exception):
    """Ctrl-C while nothing is computed."""


@contextmanager
def _raising() -> Iterator[None]:
    """Let Ctrl-C raise _Interrupt."""

    def interrupt(number, frame):
        raise _Interrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
