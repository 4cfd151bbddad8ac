"""What texts begin with: nothing, prompts of a file, or a chat."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.data import (
    ASSISTANT,
    USER,
    ChatTokenizer,
    Message,
    Tokenizer,
    template_in,
)
from fedsim.errors import BadChat, ConfigError, brief, expect
from fedsim.models import Pretrained

CHATS = "messages"
FORMS = (
    "a .txt file with a prompt in each line, or a .jsonl file of objects with prompt or messages"
)


class Opening(NamedTuple):
    """What a text begins with."""

    name: str
    """Its class, in the data set: the prompt itself; empty: none."""
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    is_pair: bool = False
    """True if the model completes the prompt, instead of continuing a text."""


def read_prompts(path: Path) -> list[Opening]:
    """Read a file of prompts.

    Raises: ConfigError: it cannot be read, has no prompt, or a line is none.
    """
    kinds = {".txt": _plain, ".jsonl": _object}
    expect("prompts", path, path.suffix in kinds, FORMS)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("prompts", path, f"a readable file in UTF-8 ({error})") from None
    read, openings = kinds[path.suffix], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            openings.append(read(line, f"prompts={path}, line {number}"))
    expect("prompts", path, bool(openings), "a file with a prompt at least")
    kinds_there = {bool(each.messages) for each in openings}
    expect("prompts", path, len(kinds_there) == 1, "prompts or messages in all lines, not both")
    return openings


def _plain(line: str, place: str) -> Opening:
    line = line.removesuffix("\r")
    return Opening(line, prompt=line)


def _object(line: str, place: str) -> Opening:
    expected = "an object with a prompt, or with messages that have a role and a content"
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # refuses halves of characters
        if isinstance(record["prompt"] if "prompt" in record else None, str):
            return Opening(record["prompt"], prompt=record["prompt"], is_pair=True)
        messages = tuple(Message(each["role"], each["content"]) for each in record[CHATS])
        if not messages or not all(isinstance(part, str) for m in messages for part in m[:2]):
            raise TypeError
    except (ValueError, RecursionError, TypeError, KeyError):
        message = f"{place}: expected {expected}, not {brief(line, 80)}"
        raise ConfigError(message, field="prompts") from None
    if messages[-1].role != USER:
        message = f"{place}: expected a message of the user as the last one"
        raise ConfigError(message, field="prompts")
    return Opening(messages[-1].content, messages=messages)


class Writer:
    """A text under way: prompts for the model, and the row that its tokens make.

    A plain text takes one stage. A chat takes a stage for each message, with the messages so far as
    the prompt of the next one.
    """

    def __init__(self, model: Pretrained, *, chats: bool):
        """Read the tokenizer, and the chat template for chats.

        Raises: ConfigError: there is no template, or it does not say where a message ends.
        """
        assert model.tokenizer is not None
        self.tokenizer = Tokenizer.load(model.tokenizer)
        self._longest = model.config.table
        self._chats: ChatTokenizer | None = None
        self._ends: dict[str | None, frozenset[int]] = {}
        if chats:
            template = template_in(model.files, self.tokenizer)
            there = "0, plain texts, for a model without a chat template"
            expect("turns", "chats", template is not None, there)
            self._chats = ChatTokenizer(self.tokenizer, template)

    def ends(self, role: str | None) -> frozenset[int]:
        """Tokens that end a text, or a message of a role.

        Raises: ConfigError: the template writes none after the user's messages.
        """
        if role not in self._ends:  # a template is rendered for them
            self._ends[role] = self._ends_of(role)
        return self._ends[role]

    def _ends_of(self, role: str | None) -> frozenset[int]:
        if role is None or self._chats is None:
            return frozenset(self.tokenizer.end_ids)
        end = self._chats.end_of_turn(role)
        there = "prompts of messages: the model's template does not say where a user's message ends"
        expect("prompts", None, role != USER or end is not None, there)
        return frozenset(self.tokenizer.end_ids) | (frozenset() if end is None else {end})

    def expect_fits(self, prompts: Sequence[Opening]) -> None:
        """Check that the model can go on from each prompt.

        Raises: ConfigError: one is too long for the model, or its template does not take it.
        """
        for prompt in prompts:
            asked = brief(prompt.prompt or "".join(m.content for m in prompt.messages), 40)
            try:
                ids = self.begin(prompt)
            except BadChat as error:
                expected = f"a chat that the template takes ({error})"
                raise ConfigError.of("prompts", asked, expected) from None
            expected = f"fewer than {self._longest} tokens, not {len(ids)}"
            expect("prompts", asked, len(ids) < self._longest, expected)

    def begin(self, opening: Opening) -> list[int]:
        """Tokens before what the model writes first."""
        if self._chats is not None:
            return self._before(opening, opening.messages, ASSISTANT if opening.messages else USER)
        ids = self.tokenizer.encode_batch([opening.prompt])[0]
        return [self.tokenizer.begin_id, *ids]

    def begin_message(
        self, opening: Opening, messages: Sequence[Message], role: str
    ) -> list[int] | None:
        """Tokens before the next message of a chat; None if it is too long for the model, or the
        template takes no such chat."""
        try:
            ids = self._before(opening, messages, role)
        except BadChat:
            return None
        return ids if len(ids) < self._longest else None

    def _before(self, opening: Opening, messages: Sequence[Message], role: str) -> list[int]:
        assert self._chats is not None, "made for chats"
        if role == ASSISTANT:
            return self._chats.encode_prompt(messages).tolist()
        return self._chats.encode_opening(messages, role).tolist()

    def most(self, ids: Sequence[int], num_tokens: int) -> int:
        """Most tokens that can follow."""
        return min(num_tokens, self._longest - len(ids))

    def text(
        self, tokens: Sequence[int], ends: frozenset[int], after: str = ""
    ) -> tuple[str, bool]:
        """(the text of drawn tokens, whether the model ended it). Args: after: what it goes on."""
        ended = bool(tokens) and tokens[-1] in ends
        before = self.tokenizer.encode_batch([after])[0]
        return self.tokenizer.decode_after(before, tokens[:-1] if ended else tokens), ended


def roles(opening: Opening, turns: int) -> Iterator[str | None]:
    """The role of each stage's message; None: the one stage of a plain text."""
    if not turns:
        yield None
        return
    for turn in range(turns):
        if turn or not opening.messages:
            yield USER
        yield ASSISTANT


def as_row(opening: Opening, said: str, messages: Sequence[Message]) -> dict[str, Any]:
    """The text of a row: messages, a prompt and its completion, or a text."""
    if messages:
        return {CHATS: [{"role": each.role, "content": each.content} for each in messages]}
    if opening.is_pair:
        return {"prompt": opening.prompt, "completion": said}
    return {"text": opening.prompt + said}
