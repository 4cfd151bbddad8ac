"""Speakers of chats: the turns of a row, and the key of each turn that names who says it.

A row belongs to all who speak in it, and so does every example that is made of it. The context of a
turn is read by the model and moves its gradient, so its author is an owner, trained on or not. Who
owns an example must depend on no text, not even on its length: an owner is also who speaks in turns
that are cut off, or says nothing.
"""

import json
import re
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedsim.errors import BadChat

ASSISTANT, USER = "assistant", "user"
OTHER_NAMES = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
OTHER_NAMES |= {"model": ASSISTANT}
HALF = re.compile("[\ud800-\udfff]")
HALVED = r"expected whole characters, got half of a surrogate pair such as \ud83d"
NAMES = (str, int, float)  # types of JSON that name a person; true is none


def loads(text: str) -> Any:
    """Read JSON. Raises: ValueError: it is none. BadChat: a key is twice in an object."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise BadChat("expected every key of an object once, got one twice")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def turns_in(value: Any) -> list[dict[str, Any]]:
    """The turns of a chat, as objects.

    Args:
      value: a list of objects, a dict of lists, or the JSON of one.
    Raises:
      BadChat: it has another form.
    """
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            python = value.lstrip().startswith(("[{'", "{'")) or "'role'" in value
            hint = "as Python writes it; json.dumps makes JSON" if python else "that is no JSON"
            raise BadChat(f"expected a list of turns, got a text {hint}") from None
    if isinstance(value, dict):
        lists = [each for each in value.values() if isinstance(each, list)]
        if not lists or len(lists) < len(value) or len({len(each) for each in lists}) > 1:
            raise BadChat("expected a list of turns, got an object")
        value = [dict(zip(value, each, strict=True)) for each in zip(*lists, strict=True)]
    if not isinstance(value, list):
        raise BadChat("expected a list of turns")
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict):
            raise BadChat(f"expected a role and a content in turn {number}")
    return value


def role_of(turn: dict[str, Any]) -> Any:
    """The role of a turn, which may be none that a template knows."""
    role = turn["role"] if turn.get("role") is not None else turn.get("from")
    return OTHER_NAMES.get(role, role) if isinstance(role, str) else role


class Spoken(NamedTuple):
    """Turns of the rows of a batch, and who speaks."""

    rows: np.ndarray
    """int64 [turns]: index of the row of each."""
    numbers: list[int]
    """Number of each turn in its row, from 1."""
    names: pa.Array
    """string [turns]: who speaks; null for nobody."""
    needed: np.ndarray
    """bool [turns]: True if somebody has to be named."""


def speakers_of(chats: pa.Array, key: str) -> Spoken:
    """Read who speaks in chats.

    A turn that says nothing counts, too. Only turns of a user have to name somebody.

    Args:
      chats: JSON of the turns of each row.
      key: key of a turn that names its speaker.
    Raises:
      BadRow: a row has no turns.
    """
    rows, numbers, names, needed = [], [], [], []
    for row, chat in enumerate(chats.to_pylist()):
        try:
            turns = [] if chat is None else turns_in(loads(chat) or [])
        except BadChat as error:
            raise BadRow(row, str(error)) from None
        for number, turn in enumerate(turns, 1):
            name = turn.get(key)
            if isinstance(name, str) and (HALF.search(name) or "\ufffd" in name):
                raise BadRow(row, f"{HALVED} in turn {number}")
            rows.append(row)
            numbers.append(number)
            names.append(str(name) if type(name) in NAMES else None)
            needed.append(role_of(turn) == USER or (name is not None and names[-1] is None))
    texts = pa.array(names, pa.string())
    return Spoken(np.array(rows, np.int64), numbers, texts, np.array(needed, bool))


class BadRow(Exception):
    """A row of a batch is invalid."""

    def __init__(self, row: int, reason: str):
        super().__init__(reason)
        self.row = row
