"""Rows of chats, and of prompts with completions, become examples with their trained tokens.

A row is `messages` (or ShareGPT's `conversations`), a prompt and a completion (texts, or lists of
messages), or Alpaca's instruction, input and output. Its examples depend on this row alone.

A chat of too many tokens is cut, or split at turns: then each example ends with a turn that is
trained on, and has as much of what came before as fits. A token is trained on in one example.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedsim.data.building.columns import ALPACA, COMPLETION, MESSAGES
from fedsim.data.building.speakers import ASSISTANT, HALF, USER, loads, role_of, turns_in
from fedsim.data.chat import (
    ROLES,
    ChatTokenizer,
    Encoded,
    Message,
    Template,
    turns_of,
)
from fedsim.data.store import MARKED
from fedsim.errors import BadChat, SlowTemplate

DEFAULTS = {MESSAGES: ASSISTANT, COMPLETION: COMPLETION, ALPACA: COMPLETION}
CALLS = ("tool_calls", "function_call", "audio", "image", "images", "video", "videos")  # of a turn
CALLS += ("attachments", "files")
SAID = ("content", "value", "refusal")  # the last is OpenAI's, where the assistant refuses
REASONING = ("reasoning_content", "reasoning", "thinking")  # which some templates write, too
MARKS = {"weight": 0, "train": False, "loss": False, "masked": True}
"""Marks of a turn, with the value by which other programs leave it out of training."""
DOUBTFUL = ("mask", "loss_mask", "trainable", "train_detail", "ignore", "label", "labels")
"""Marks of a turn that mean one thing in one program and another in the next."""
BETWEEN = "\n\n"  # parts of Alpaca's prompt


@dataclass(frozen=True)
class Chats:
    """Settings by which rows of chats become examples: the same for all parts."""

    form: str
    """The form of rows: messages, completion or alpaca."""
    train_on: str
    """As `config.BuildConfig` has it."""
    template: Template | None
    """None if the form needs none."""
    max_length: int
    long_texts: str
    skip_unknown: bool
    """Leave out rows that cannot be encoded, and count them."""

    def described(self) -> dict[str, Any]:
        """The settings for metadata.json."""
        found = {"form": self.form, "train_on": self.train_on, "skip_unknown": self.skip_unknown}
        if self.template is not None:
            found |= {"template_sha256": self.template.sha256, "template_date": self.template.date}
        return found


class ChatExamples(NamedTuple):
    """Examples of the rows of a batch."""

    lengths: np.ndarray
    """int64 [examples]: number of tokens of each."""
    values: np.ndarray
    """Marked ids of all examples end to end; see `store.MARKED`."""
    origin: np.ndarray
    """int64 [examples]: index of the row that each comes from."""
    tokens: int
    """Number of tokens of the rows."""
    cut: int
    """Number of tokens that were cut off; where rows are split, of trained ones alone."""
    long: int
    """Number of rows of too many tokens."""
    untrained: int
    """Number of rows without a trained token, which are left out."""
    skipped: int
    """Number of rows that cannot be encoded."""


def chat_examples(
    rows: Sequence[str],
    chats: Chats,
    tokenizer: ChatTokenizer,
    refuse: Callable[[int, str], None],
) -> ChatExamples:
    """Make the examples of rows.

    Args:
      rows: each a JSON list of the values of the columns of `chats.form`.
      refuse: called with the index of a row that cannot be encoded, and the reason. It raises.
    """
    found: list[Encoded] = []
    origin: list[int] = []
    tokens = cut = long = untrained = skipped = 0
    for index, row in enumerate(rows):
        try:
            chat = _Chat(loads(row), chats, tokenizer)
            whole = chat.whole()
            own = [each for each in chat.examples(whole) if each.trained[1:].any()]
        except (BadChat, RecursionError) as error:
            if not chats.skip_unknown or isinstance(error, SlowTemplate):
                refuse(index, str(error))
            skipped += 1
            continue
        tokens += len(whole.ids)
        if len(whole.ids) > chats.max_length:
            long += 1
            if chats.long_texts == "cut":
                cut += len(whole.ids) - (chats.max_length if own else 0)
            else:  # a turn may be longer than an example
                kept = sum(int(each.trained.sum()) for each in own)
                cut += max(0, int(whole.trained.sum()) - kept)
        untrained += not own
        found += own
        origin += [index] * len(own)
    lengths = np.array([len(each.ids) for each in found], np.int64)
    values = [(2 * each.ids + each.trained).astype(MARKED) for each in found]
    joined = np.concatenate([np.zeros(0, MARKED), *values])
    places = np.array(origin, np.int64)
    return ChatExamples(lengths, joined, places, tokens, cut, long, untrained, skipped)


class _Chat:
    """A row of a data set, read."""

    def __init__(self, values: list[Any], chats: Chats, tokenizer: ChatTokenizer):
        self.settings, self.tokenizer = chats, tokenizer
        self.pair: tuple[str, str] | None = None
        self.train_on = chats.train_on
        if chats.form == MESSAGES:
            self.messages = messages_of(values[0])
        elif chats.form == ALPACA:
            self._read_alpaca(*values)
        else:
            self._read_pair(*values)

    def _read_pair(self, prompt: Any, completion: Any) -> None:
        prompt, completion = _listed(prompt), _listed(completion)
        if not isinstance(prompt, list) and not isinstance(completion, list):
            self.pair = _text(prompt, "a prompt"), _text(completion, "a completion")
            return
        before, after = _turns_of(prompt, USER), _turns_of(completion, ASSISTANT)
        if self.train_on == COMPLETION:
            before = [each._replace(counts=False) for each in before]
            self.train_on = ASSISTANT
        self.messages = [*before, *after]

    def _read_alpaca(self, instruction: Any, *others: Any) -> None:
        asked = [_text(instruction, "an instruction"), *(_text(x, "an input") for x in others[:-1])]
        prompt, output = BETWEEN.join(filter(None, asked)), _text(others[-1], "an output")
        if self.settings.template is None:
            self.pair = prompt + BETWEEN, output
        self.messages = [Message(USER, prompt), Message(ASSISTANT, output)]

    def whole(self) -> Encoded:
        """The tokens of the whole row."""
        if self.pair is None:
            return self._encode(self.messages)
        return self.tokenizer.encode_pair(*self.pair, self.train_on)

    def examples(self, whole: Encoded) -> list[Encoded]:
        """The examples of the row. Args: whole: the result of `whole`."""
        most = self.settings.max_length
        if len(whole.ids) <= most:
            return [whole]
        if self.settings.long_texts == "cut":
            return [_first(whole, most)]
        return self._split() if self.pair is None else [_last(whole, most)]

    def _encode(self, messages: Sequence[Message], told: int = 0) -> Encoded:
        return self.tokenizer.encode(messages, self.train_on, told)

    def _split(self) -> list[Encoded]:
        every = self.train_on == "all"
        head = len([each for each in self.messages[:1] if each.role not in (USER, ASSISTANT)])
        turns = turns_of(self.messages, ASSISTANT if every else self.train_on)
        if every and len(self.messages) - 1 not in turns:
            turns.append(len(self.messages) - 1)
        begins = [
            i
            for i in range(head, len(self.messages))
            if i == head or self.messages[i - 1].role == ASSISTANT
        ]
        found, done = [], head
        for number, turn in enumerate(turns):
            if turn >= done:
                example, done = self._next(turns, number, begins, head, done)
                found.append(example)
        return found

    def _next(
        self, turns: Sequence[int], number: int, begins: Sequence[int], head: int, done: int
    ) -> tuple[Encoded, int]:
        """(example of turns[number] with all else that fits, number of messages up to its end)."""
        most, every, turn = self.settings.max_length, self.train_on == "all", turns[number]

        def window(start: int, end: int) -> Encoded:
            told = [each._replace(counts=False) for each in self.messages[start:done]]
            new = self.messages[max(start, done) : end + 1]
            heard = head if done > head else 0  # in the first example it is trained on
            return self._encode([*self.messages[:head], *told, *new], heard)

        start = done if every else max(done, begins[bisect_right(begins, turn) - 1])
        # Of several turns that ask, the last ones.
        starts = [start] if every else range(max(start, turn - 1), start - 1, -1)
        size, best = _longest(len(starts), lambda i: window(starts[i], turn), most)
        if best is None:
            return _first(window(starts[0], turn), most), turn + 1
        start, rest = starts[size - 1], len(turns) - number - 1
        size, longer = _longest(rest, lambda i: window(start, turns[number + 1 + i]), most)
        best, end = longer or best, turns[number + size]
        if not every:
            before = bisect_left(begins, start)
            _, longer = _longest(before, lambda i: window(begins[before - 1 - i], end), most)
            best = longer or best
        return best, end + 1


def _longest(count: int, make: Callable[[int], Encoded], most: int) -> tuple[int, Encoded | None]:
    """The longest of some examples, each longer than the one before, of at most `most` tokens.

    Few are made: at steps of 1, 2, 4, ..., and by bisection where one is too long.
    Args:
      make: makes the example of an index below `count`.
    Returns:
      (number of examples that fit, the last of them).
    """
    best, size, bound, step = None, 0, count, 1
    while size < bound:
        at = min(size + step, bound) - 1
        each = make(at)
        if len(each.ids) <= most:
            best, size = each, at + 1
        else:
            bound = at
        step = 2 * step if bound == count else (bound - size + 1) // 2
    return size, best


def messages_of(value: Any) -> list[Message]:
    """Read the turns of a chat.

    Args:
      value: a list of {role, content} or {from, value}, a dict of such lists, or its JSON.
    Raises:
      BadChat: it has another form, or a turn that no template knows.
    """
    if not (turns := turns_in(value)):
        raise BadChat("expected a list of turns")
    return [_message(turn, number) for number, turn in enumerate(turns, 1)]


def _message(turn: dict[str, Any], number: int) -> Message:
    where, role = f"in turn {number}", role_of(turn)
    if role not in ROLES:
        raise BadChat(f"expected a role among {', '.join(ROLES)} {where}")
    if called := [name for name in (*CALLS, *REASONING) if turn.get(name)]:
        raise BadChat(f"expected text alone, got {called[0]} {where}")
    if "content" not in turn and "value" not in turn:
        raise BadChat(f"expected a content {where}")
    # Arrow gives null for a key that other rows have.
    content = next((turn[name] for name in SAID if turn.get(name) is not None), None)
    marks = {name: turn[name] for name in MARKS if turn.get(name) is not None}
    for name, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            kinds = "0 or 1" if name == "weight" else "true or false"
            raise BadChat(f"expected {kinds} as {name} {where}")
    if doubtful := [name for name in DOUBTFUL if turn.get(name) is not None]:
        raise BadChat(f"expected `train` of true or false instead of {doubtful[0]} {where}")
    trained = all(value != MARKS[name] for name, value in marks.items())
    return Message(role, _text(content, f"a content {where}"), trained)


def _listed(value: Any) -> Any:
    """The turns whose JSON a text is, as in cells of CSV files; else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        turns = turns_in(value)
    except BadChat:
        return value
    said = all(role_of(each) in ROLES and ("content" in each or "value" in each) for each in turns)
    return turns if turns and said else value


def _turns_of(value: Any, role: str) -> list[Message]:
    return messages_of(value) if isinstance(value, list) else [Message(role, _text(value, role))]


def _text(value: Any, what: str) -> str:
    """A text, or a list of parts that are texts; null is none."""
    if value is None:
        return ""
    if isinstance(value, list):
        if all(isinstance(each, dict) and each.get("type") == "text" for each in value):
            value = "".join(_text(each.get("text"), what) for each in value)
    if not isinstance(value, str):
        raise BadChat(f"expected text as {what}")
    return HALF.sub("\ufffd", value)


def _first(encoded: Encoded, most: int) -> Encoded:
    return Encoded(encoded.ids[:most], encoded.trained[:most])


def _last(encoded: Encoded, most: int) -> Encoded:
    """The begin token and the end of a row, if all that is trained on fits; else its beginning."""
    if not encoded.trained[-most + 1 :].sum() == encoded.trained.sum():
        return _first(encoded, most)
    ids, trained = encoded.ids, encoded.trained
    return Encoded(
        np.concatenate([ids[:1], ids[1 - most :]]),
        np.concatenate([trained[:1], trained[1 - most :]]),
    )
