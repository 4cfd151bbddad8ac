"""Synthetic texts as the rows of a data set: in its tokens, framed and cut as users' texts are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsim.data import TEMPLATE, ChatTokenizer, Dataset, Message, Tokenizer, UserStore, template_of
from fedsim.errors import BadChat, ConfigError, expect

TEXT, MESSAGES, CLASS = "text", "messages", "prompt_class"
"""Columns of a synthetic set: a row has a text, or the turns of a chat; and maybe a class."""


def text_of(row: Mapping[str, Any]) -> str:
    """The text of a row, or what is said in its chat, a turn a line."""
    if row.get(MESSAGES) is None:
        return str(row[TEXT])
    return "\n".join(str(each["content"]) for each in row[MESSAGES])


def shown(row: Mapping[str, Any]) -> str:
    """The text of a row, or its chat with the role of each turn, to be read."""
    if row.get(MESSAGES) is None:
        return str(row[TEXT])
    return "\n".join(f"{each['role']}: {each['content']}" for each in row[MESSAGES])


def store_of(rows: Iterable[Mapping[str, Any]], data: Dataset) -> UserStore:
    """Synthetic texts as a store in the tokens and the form of the data; each is its own user.

    Texts that the data's chat template refuses are left out.

    Raises:
      ConfigError: the data have no tokenizer, or no text is left.
    """
    path = data.tokenizer_path
    expect("data", data.path, path is not None, "data with a tokenizer")
    assert path is not None
    tokenizer, longest = Tokenizer.load(path), data.train.max_length
    rows = list(rows)
    chats = _Chats(data, tokenizer) if any(row.get(MESSAGES) is not None for row in rows) else None
    framed: dict[str, list[list[int]]] = {}
    flags: dict[str, list[list[bool]]] = {}
    texts = iter(tokenizer.encode_batch([row[TEXT] for row in rows if row.get(MESSAGES) is None]))
    for number, row in enumerate(rows):
        if row.get(MESSAGES) is None:
            ids = [tokenizer.begin_id, *next(texts), tokenizer.end_id]
            trained = [True] * len(ids)
        else:
            assert chats is not None
            if (found := chats.encode(row[MESSAGES])) is None:
                continue
            ids, trained = found
        name = f"{number:09d}"
        framed[name], flags[name] = [ids[:longest]], [trained[:longest]]
    expect("texts", len(rows), bool(framed), "synthetic texts in the form of the data")
    marked = flags if data.train.is_flagged else None
    return UserStore.from_examples(framed, longest, data.train.vocab_size, marked)


class _Chats:
    """The chat template and the trained turns of a data set."""

    def __init__(self, data: Dataset, tokenizer: Tokenizer):
        file = data.path and data.path / TEMPLATE
        template = template_of(tokenizer, file if file and file.is_file() else None)
        if template is None:
            raise ConfigError.of("data", data.path, "data with a chat template, for chats")
        self._chats = ChatTokenizer(tokenizer, template)
        self._train_on = data.metadata.get("chats", {}).get("train_on", "all")

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]] | None:
        """(token ids, which are trained on) of a chat; None if the template refuses it."""
        turns = [Message(str(each["role"]), str(each["content"])) for each in messages]
        try:
            found = self._chats.encode(turns, self._train_on)
        except BadChat:
            return None
        if not found.trained[1:].any():
            return None
        return found.ids.tolist(), found.trained.tolist()


def examples(store: UserStore, rows: np.ndarray) -> list[np.ndarray]:
    """Token ids of rows of a store, int32."""
    tokens, sizes = store.gather(rows, store.max_length)
    return [row[:size] for row, size in zip(tokens, sizes, strict=True)]
