"""Synthetic texts as the rows of a data set: in its tokens, framed and cut as users' texts are."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedsim.data import (
    ChatTokenizer,
    Dataset,
    Message,
    Tokenizer,
    UserStore,
    template_in,
)
from fedsim.errors import BadChat, expect

CLASS = "prompt_class"
"""Column of a synthetic set: the prompt that a text begins with."""
MESSAGES, COMPLETION = "messages", "completion"


def text_of(row: Mapping[str, Any]) -> str:
    """The text of a row: its text, prompt and completion, or the turns of its chat, a line each."""
    return "\n".join(said for _, said in _turns(row))


def shown(row: Mapping[str, Any]) -> str:
    """The text of a row to be read, with the role of each turn."""
    return "\n".join(f"{role}: {said}" if role else said for role, said in _turns(row))


def cleaned(row: Mapping[str, Any], clean: Callable[[str], str]) -> dict[str, Any]:
    """The row with `clean` applied to all that it says."""
    said: dict[str, Any] = {
        name: clean(row[name]) for name in ("text", "prompt", COMPLETION) if name in row
    }
    if row.get(MESSAGES) is not None:
        said[MESSAGES] = [{**each, "content": clean(each["content"])} for each in row[MESSAGES]]
    return {**row, **said}


def _turns(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    if row.get(MESSAGES) is not None:
        return [(str(each["role"]), str(each["content"])) for each in row[MESSAGES]]
    if row.get(COMPLETION) is not None:
        return [("prompt", str(row["prompt"])), (COMPLETION, str(row[COMPLETION]))]
    return [("", str(row["text"]))]


def store_of(rows: Iterable[Mapping[str, Any]], data: Dataset) -> UserStore:
    """Synthetic texts as a store in the tokens and the form of the data; each is its own user.

    Chats that the data's chat template refuses, and texts without a trained token, are left out.

    Args:
      rows: each has a text, messages, or a prompt and a completion.
      data: of the run.

    Raises:
      ConfigError: the data have no tokenizer, or no text is left.
    """
    encoder, longest = _Encoder(data), data.train.max_length
    framed: dict[str, list[list[int]]] = {}
    flags: dict[str, list[list[bool]]] = {}
    for number, row in enumerate(rows):
        ids, trained = encoder.encode(row)
        if any(trained[1:longest]):
            name = f"{number:09d}"
            framed[name], flags[name] = [ids[:longest]], [trained[:longest]]
    expect("texts", len(framed), bool(framed), "synthetic texts in the form of the data")
    marked = flags if data.train.is_flagged else None
    return UserStore.from_examples(framed, longest, data.train.vocab_size, marked)


class _Encoder:
    """The tokenizer and chat template of a data set."""

    def __init__(self, data: Dataset):
        expect("data", data.path, data.tokenizer_path is not None, "data with a tokenizer")
        assert data.tokenizer_path is not None
        self.data, self.tokenizer = data, Tokenizer.load(data.tokenizer_path)
        self.train_on = data.metadata.get("chats", {}).get("train_on", "all")

    @functools.cached_property
    def _chats(self) -> ChatTokenizer:
        return ChatTokenizer(self.tokenizer, template_in(self.data.path, self.tokenizer))

    def encode(self, row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        """(token ids, which are trained on) of a row; none if the template refuses its chat."""
        turns = _turns(row)
        if row.get(MESSAGES) is not None:
            try:
                found = self._chats.encode([Message(*turn) for turn in turns], self.train_on)
            except BadChat:
                return [], []
        elif row.get(COMPLETION) is not None:
            found = self._chats.encode_pair(turns[0][1], turns[1][1], self.train_on)
        else:
            (ids,) = self.tokenizer.encode_batch([turns[0][1]])
            ids = [self.tokenizer.begin_id, *ids, self.tokenizer.end_id]
            return ids, [False] + [True] * (len(ids) - 1)
        return found.ids.tolist(), found.trained.tolist()
