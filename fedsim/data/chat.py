"""Chats as token ids: the model's own chat template, and which tokens are trained on.

A chat template is a program (Jinja) that comes with a model. It runs in a sandbox in a process with
limits of time and memory, as `transformers` runs it, and the ids are those of `transformers`, with
one exception: special tokens that a person spells in a message are text, and only those that the
template writes are special tokens. Added tokens that are not special, but that the template names,
count as special tokens too, except where the assistant writes them, such as <think>.

How that works: characters for private use that occur nowhere in a chat mark, in the messages, where
a turn that is trained on begins and ends, and break up what spells a special token. In the rendered
text, each special token is the template's. It is replaced by a character for private use, which a
copy of the tokenizer has as a token. So a text is encoded once and as a whole, and trained tokens
are found by the positions of their characters.
"""

import contextlib
import datetime
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from fedsim.data import limited
from fedsim.data.tokenizer import NAME_FILES, TEMPLATE, Tokenizer, read_beside, unknown_token
from fedsim.errors import BadChat, DataError, SlowTemplate, brief
from fedsim.files import expand_home

NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # that a template may name
DATE = "2026-01-01"
RULE = 4  # version of how chats become tokens: a change that gives others gets another number
ASSISTANT, USER = "assistant", "user"
ROLES = ("system", "developer", USER, ASSISTANT)
PRIVATE = re.compile("[\U000f0000-\U0010ffff]")  # characters for private use
FIRST, LAST = 0xF0000, 0x10FFFD
BREAK, BEGINS, ENDS = range(3)  # places of the marks among the private characters of a chat
NO_MARKS = ("", "", "")


class Message(NamedTuple):
    """A turn of a chat."""

    role: str
    content: str
    counts: bool = True
    """False if it is not to be trained on, whoever speaks."""


class Encoded(NamedTuple):
    """A chat as token ids."""

    ids: np.ndarray
    """int64 [tokens]."""
    trained: np.ndarray
    """bool [tokens]: which tokens the model learns to predict."""


def template_beside(tokenizer: str | Path) -> str | None:
    """The chat template among the files of a model.

    Args:
      tokenizer: path of its tokenizer.json.
    Raises:
      DataError: a file is damaged.
    """
    file = Path(tokenizer)
    own = _beside(file, TEMPLATE)
    if own.is_file():
        return read_template(own)
    found = read_beside(_beside(file, NAME_FILES[0])).get("chat_template")
    if isinstance(found, list):  # of {name, template}
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def read_template(file: str | Path) -> str:
    """Read a template. Raises: DataError: the file is no text."""
    try:
        return Path(expand_home("chat_template", file)).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = type(error).__name__
        raise DataError.of("chat_template", file, f"a Jinja file ({reason})") from None


def named_tokens(tokenizer: str | Path) -> dict[str, str]:
    """The tokens that the files of NAME_FILES name, the first one first, as {"bos_token": "<s>"}.

    Args:
      tokenizer: path of a tokenizer.json.
    """
    found: dict[str, str] = {}
    for file in NAME_FILES:
        settings = read_beside(_beside(Path(tokenizer), file))
        for name in (f"{kind}_token" for kind in NAMED_TOKENS):
            token = settings.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found.setdefault(name, token)
    return found


def _beside(tokenizer: Path, name: str) -> Path:
    """Another file of a tokenizer's model, which a run has in a folder of its own."""
    own = tokenizer.with_name(name)
    return own if own.is_file() else tokenizer.parent / "model" / name


@dataclass(frozen=True)
class Template:
    """A chat template, and what it may ask for.

    Attributes:
      source: the program.
      tokens: names and texts of the tokens it may write, such as ("eos_token", "</s>").
      date: the day that it takes for today, as YYYY-MM-DD, so that equal data give equal ids.
    Raises:
      DataError: the program is no template, or the date is none.
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    date: str = DATE

    def __post_init__(self):
        try:
            datetime.datetime.fromisoformat(self.date)
        except ValueError:
            raise DataError.of("template_date", self.date, "a day as YYYY-MM-DD") from None
        try:
            limited.call("check", self.source, self.date, seconds=limited.RENDER_S)
            return
        except limited.LimitReached as error:
            reason = f"that takes at most {error} to compile"
        except limited.Refused as error:
            reason = f"({brief(str(error), 200)})"
        raise DataError(f"chat_template: expected a Jinja template {reason}", field="chat_template")

    @property
    def sha256(self) -> str:
        """Digest of the program."""
        return hashlib.sha256(self.source.encode()).hexdigest()

    @functools.cached_property
    def says_what_is_generated(self) -> bool:
        """True if blocks of the template mark what the assistant generates."""
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def render(
        self, messages: Sequence[Message], marks: Sequence[str] = NO_MARKS, *, prompt: bool = False
    ) -> str:
        """The text of a chat. The template decides what it does with a role.

        Args:
          marks: what to put for BREAK, BEGINS and ENDS, the last two around what the template says
            is generated.
          prompt: end with the beginning of the assistant's next turn.
        Raises:
          BadChat: the template refuses the chat, or takes too long.
        """
        turns = [{"role": each.role, "content": each.content} for each in messages]
        variables = {"messages": turns, "tools": None, "documents": None}
        variables |= {"add_generation_prompt": prompt, **dict(self.tokens)}
        program = self.source, self.date, variables, marks[BEGINS], marks[ENDS]
        try:
            return limited.call("render", *program, seconds=limited.RENDER_S)
        except limited.LimitReached as error:
            raise SlowTemplate(f"its template takes more than {error}") from None
        except limited.Refused as error:
            raise BadChat(brief(str(error), 200)) from None


def template_of(
    tokenizer: Tokenizer, file: str | Path | None = None, date: str = DATE
) -> Template | None:
    """The chat template of a tokenizer; None if there is none.

    Args:
      file: a template to take instead of the one among the tokenizer's files.
      date: of `Template`.
    Raises:
      DataError: a file is damaged, or no template.
    """
    found = source_of(tokenizer, file)
    return None if found is None else Template(*found, date)


def source_of(
    tokenizer: Tokenizer, file: str | Path | None = None
) -> tuple[str, tuple[tuple[str, str], ...]] | None:
    """(source, tokens) of the `Template` of a tokenizer, which may be no template; or None.

    Raises: DataError: a file is damaged.
    """
    beside = tokenizer.file
    source = template_beside(beside) if file is None and beside else None
    source = source if file is None else read_template(file)
    if source is None:
        return None
    tokens = {"bos_token": str(tokenizer.begin), "eos_token": str(tokenizer.end)}
    if beside and any(beside.with_name(name).is_file() for name in NAME_FILES):
        tokens = named_tokens(beside)
    return source, tuple(tokens.items())


class ChatTokenizer:
    """A tokenizer that tells special tokens from texts that spell them."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None = None):
        """Read the special tokens of a tokenizer, and those that a template names."""
        self._template = template
        named = [template.source, *dict(template.tokens).values()] if template else []
        self.begin_id, self.end_id = tokenizer.begin_id, tokenizer.end_id
        record = json.loads(tokenizer.json)
        record["post_processor"] = None  # which would shorten positions
        # A text of one character cannot be broken up.
        added = {t["content"]: t for t in record["added_tokens"] if len(t["content"]) > 1}
        special = [text for text, token in added.items() if token["special"]]
        # White space is a token in texts, too: of Gemma 3, several line breaks.
        others = (text for text in added.keys() - special if text.strip())
        others = [text for text in others if any(text in each for each in named)]
        self._special = [added[text] for text in added if text in {*special, *others}]
        for token in self._special:
            token["special"] = True  # so that the copy makes none of text
        self._json = json.dumps(record)
        self._number = {token["content"]: i for i, token in enumerate(self._special)}
        self._written, self._others = _any_of(self._number), _any_of(others)
        self._spellings, self._of_assistant = _Spellings.of(self._number), _Spellings.of(special)
        self._copies: dict[int, tuple[tokenizers.Tokenizer, np.ndarray]] = {}
        self._left_out: dict[tuple[str, ...], list[int]] = {}
        unknown = unknown_token(record["model"])
        self._reserved = np.array(
            [token["id"] for token in self._special if token["content"] != unknown], np.int64
        )

    def encode(self, messages: Sequence[Message], train_on: str, context: int = 0) -> Encoded:
        """Token ids of a chat.

        Args:
          train_on: "all", "assistant", "user", or "completion", the last turn if it is the
            assistant's.
          context: number of first turns that "all" leaves out, with what opens the next one.
        Raises:
          BadChat: there is no template, it refuses the chat, leaves out a turn, or does not say
            where a turn is.
        """
        private, plain = self._plain(messages)
        if train_on == "all":
            text, _ = self._write(plain, private)
            begin = self._begin_of(plain, context, private) if context else 0
            return self._encoded(text, [(begin, len(text))], private)
        turns = turns_of(messages, train_on)
        if train_on != USER and self._template and self._template.says_what_is_generated:
            text, places = self._write(plain, private, private)
            spans = _spans(places)
            own = [i for i, each in enumerate(messages) if each.role == ASSISTANT]
            if spans is None or turns != own and len(spans) != len(own):
                raise BadChat("its template does not say which turn it generates")
            if len(spans) == len(own):
                spans = [span for i, span in zip(own, spans, strict=True) if i in turns]
            return self._encoded(text, spans, private)
        text, spans = self._rendered(plain, turns, private)
        for role in {messages[i].role for i in turns}:
            own = [i for i in turns if messages[i].role == role]
            end = self._end_of_turn(plain, own, private, text, spans)
            for i in own:
                start, stop = spans[i]
                there = text[stop : stop + len(end)]
                start -= self._written_before(text, start, private) if role == ASSISTANT else 0
                spans[i] = start, stop + len(os.path.commonprefix([there, end]))
        return self._encoded(text, list(spans.values()), private)

    def encode_prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Token ids of a chat up to the beginning of the assistant's next turn, int64 [tokens].

        Raises:
          BadChat: there is no template, it refuses the chat, or leaves out a turn.
        """
        private, plain = self._plain(messages)
        text, _ = self._write(plain, private, prompt=True)
        return self._encoded(text, [], private).ids

    def end_of_turn(self) -> int | None:
        """Id of the token that the template writes after what the assistant says; None without one.

        Raises: BadChat: as `encode`.
        """
        private, plain = self._plain([Message(USER, "a"), Message(ASSISTANT, "b")])
        text, spans = self._rendered(plain, [1], private)
        after = (private.index(c) - ENDS - 1 for c in text[spans[1][1] :] if c in private)
        number = next(after, None)
        return None if number is None else self._special[number]["id"]

    def notes(self) -> list[str]:
        """Lines about what the template does not teach the model; none if all is well."""
        found = []
        with contextlib.suppress(BadChat):  # of a template that shows no chat of two turns
            if self.end_of_turn() is None:
                found += [
                    "the chat template writes no special token after an answer, so that the "
                    "model does not learn to stop"
                ]
            if self._opening is None:
                found += [
                    "the chat template asks for an answer otherwise than it begins one, so that "
                    "the model is not trained on what serving asks: name another chat_template"
                ]
        return found

    @functools.cached_property
    def _finds_special_tokens(self) -> bool:
        """True if a template's special tokens are also found when its text is encoded plainly."""
        assert self._template is not None, "has one"
        asked = [Message(USER, "a"), Message(ASSISTANT, "b")]
        private = self._private_for(self._template.source)
        copy, ids_of = self._copy(private)
        try:
            text, plain = self._write(asked, private)[0], self._template.render(asked)
        except SlowTemplate:
            raise
        except BadChat:  # it shows no chat of two turns
            return True
        own = ids_of[copy.encode(text, add_special_tokens=False).ids]
        copy.encode_special_tokens = False
        usual = copy.encode(plain, add_special_tokens=False).ids
        copy.encode_special_tokens = True
        return own.tolist() == usual

    @functools.cached_property
    def _opening(self) -> tuple[str, str] | None:
        """(what the template writes to ask for an answer, what it writes then before the last
        answer, such as an empty block of reasoning); None if answers begin in another way."""
        assert self._template is not None, "has one"
        asked, sign = [Message(USER, "a")], chr(FIRST)
        try:
            closed, prompt = (self._template.render(asked, prompt=x) for x in (False, True))
            whole = self._template.render([*asked, Message(ASSISTANT, sign)])
        except BadChat:
            return "", ""
        before = whole.partition(sign)[0]
        if not before.startswith(prompt):
            return None
        asks = prompt.removeprefix(closed)
        return (asks, before[len(prompt) :]) if asks else ("", "")

    def _written_before(self, text: str, start: int, private: str) -> int:
        """Number of characters by which the template's own beginning of an answer, which serving
        asks for, too, goes before what the answer says."""
        opening = [self._tokens(self._written, x, private) for x in self._opening or ("", "")]
        return len(opening[1]) if text.endswith("".join(opening), 0, start) else 0

    def _plain(self, messages: Sequence[Message]) -> tuple[str, list[Message]]:
        """(characters for private use, the messages without special tokens)."""
        if self._template is None:
            raise BadChat("expected texts, or a tokenizer with a chat template")
        if not self._finds_special_tokens:
            raise BadChat(
                "its tokenizer does not find the special tokens of the chat template; expected "
                "`normalized` and `single_word` of false for them in tokenizer.json"
            )
        for turn in self._left_out_of(tuple(each.role for each in messages)):
            if messages[turn].content.strip():
                role = messages[turn].role
                raise BadChat(f"its template leaves out turn {turn + 1}, of role {role}")
        said = "".join(each.content for each in messages)
        private = self._private_for(said + self._template.source)
        return private, [self._broken(each, private[BREAK]) for each in messages]

    def _left_out_of(self, roles: tuple[str, ...]) -> list[int]:
        """Indices of turns that the template does not write, whatever they say."""
        if roles not in self._left_out:  # by roles alone, so that no row decides about another
            assert self._template is not None, "has one"
            signs = [chr(FIRST + i % (LAST - FIRST)) for i in range(len(roles))]
            try:
                written = {*self._template.render([*map(Message, roles, signs)])}
            except SlowTemplate:
                raise
            except BadChat:
                written = {*signs}  # it may refuse the chat, too
            if len(self._left_out) >= 1000:
                self._left_out.clear()
            self._left_out[roles] = [i for i, sign in enumerate(signs) if sign not in written]
        return self._left_out[roles]

    def encode_pair(self, prompt: str, completion: str, train_on: str) -> Encoded:
        """Token ids of a prompt and its completion, between a begin and an end token.

        Args:
          train_on: "all", "completion" (or "assistant"), or "user", the prompt.
        """
        private = self._private_for(prompt + completion)
        # Nobody but the tokenizer says which texts are tokens here.
        prompt, completion = (self._tokens(self._others, x, private) for x in (prompt, completion))
        text = prompt + completion
        answered = bool(completion.strip())  # else there is nothing to learn, not even silence
        spans = {"all": [(0, len(text))], USER: [(0, len(prompt))]}
        completed = [(len(prompt), len(text))] * answered
        found = self._encoded(text, spans.get(train_on, completed), private)
        ids = np.concatenate([[self.begin_id], found.ids, [self.end_id]])
        ends = train_on == "all" or train_on != USER and answered
        return Encoded(ids, np.concatenate([[False], found.trained, [ends]]))

    def _rendered(
        self, plain: Sequence[Message], turns: Sequence[int], private: str
    ) -> tuple[str, dict[int, tuple[int, int]]]:
        """The text of a chat without marks, and the place of each of `turns` in it."""
        parts = [_parted(plain[i].content) for i in turns]

        def with_contents(contents: Iterable[str]) -> tuple[str, list[tuple[int, int]]]:
            changed = list(plain)
            for i, content in zip(turns, contents, strict=True):
                changed[i] = plain[i]._replace(content=content)
            return self._write(changed, private)

        text, _ = self._write(plain, private)
        begins, ends = private[BEGINS], private[ENDS]
        again, places = with_contents(f"{a}{begins}{core}{ends}{b}" for a, core, b in parts)
        found = _spans(places)
        if text != again or found is None or len(found) != len(turns):
            raise BadChat(
                "its template changes what a turn says, so that trained tokens cannot be told; "
                "expected {% generation %} blocks in it"
            )
        # A template that strips the blanks of turns may write the same ones itself.
        leads = any(a for a, _, _ in parts) and text != with_contents(c + b for _, c, b in parts)[0]
        trails = (
            any(b for _, _, b in parts) and text != with_contents(a + c for a, c, _ in parts)[0]
        )
        spans: dict[int, tuple[int, int]] = {}
        for i, (start, end), (lead, _, trail) in zip(turns, found, parts, strict=True):
            start -= len(lead) if leads and text.endswith(lead, 0, start) else 0
            end += len(trail) if trails and text.startswith(trail, end) else 0
            spans[i] = start, end
        return text, spans

    def _begin_of(self, plain: Sequence[Message], turn: int, private: str) -> int:
        """The place where the text of a turn begins."""
        marked = list(plain)
        marked[turn] = plain[turn]._replace(content=private[BEGINS] + plain[turn].content)
        _, places = self._write(marked, private)
        if not places:
            raise BadChat("its template leaves out a turn, so that trained tokens cannot be told")
        return places[0][0]

    def _end_of_turn(self, plain, own, private, text, spans) -> str:
        """What the template writes after the last of the turns `own`, were it the end."""
        last = own[-1]
        if last < len(plain) - 1:
            text, spans = self._rendered(plain[: last + 1], own[-1:], private)
        return text[spans[last][1] :]

    def _private_for(self, text: str) -> str:
        """Characters for private use that are not in `text`: the marks, then special tokens."""
        taken = {ord(found) for found in PRIVATE.findall(text)}
        size = ENDS + 1 + len(self._special)
        for first in range(FIRST, LAST - size, size):
            if taken.isdisjoint(range(first, first + size)):
                return "".join(map(chr, range(first, first + size)))
        raise BadChat("it has every character for private use")

    def _broken(self, message: Message, mark: str) -> Message:
        own = self._of_assistant if message.role == ASSISTANT else self._spellings
        return message._replace(content=own.broken(message.content, mark))

    def _tokens(self, pattern: re.Pattern[str], text: str, private: str) -> str:
        """A text with a private character for each token that is found in it."""
        return pattern.sub(lambda found: private[ENDS + 1 + self._number[found[0]]], text)

    def _write(
        self, messages: Sequence[Message], private: str, marks: Sequence[str] = NO_MARKS, **options
    ) -> tuple[str, list[tuple[int, int]]]:
        """(what the template writes, with private characters for special tokens; marks in it)."""
        assert self._template is not None, "has one"
        text = self._template.render(messages, marks, **options)
        if not set(private[ENDS + 1 :]).isdisjoint(PRIVATE.findall(text)):
            raise BadChat("its template writes a character for private use")
        text = self._tokens(self._written, text, private)
        parts, places, at = [], [], 0
        for part in re.split(f"([{private[: ENDS + 1]}])", text):
            if part and part in private[: ENDS + 1]:
                if (kind := private.index(part)) != BREAK:
                    places.append((at, kind))
            else:
                parts.append(part)
                at += len(part)
        return "".join(parts), places

    def _encoded(self, text: str, spans: Sequence[tuple[int, int]], private: str) -> Encoded:
        """Encode a text without marks. Tokens with a character in one of `spans` are trained."""
        copy, ids_of = self._copy(private)
        encoded = copy.encode(text, add_special_tokens=False)
        raw = np.array(encoded.ids, np.int64)
        if np.isin(raw, self._reserved).any():
            raise BadChat("its tokenizer makes a special token of text")
        begins, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, begins + 1)
        marked = np.zeros(len(text) + 1, np.int64)
        for start, end in spans:
            marked[start:end] = 1
        before = np.concatenate([[0], np.cumsum(marked)])  # marked characters before each
        return Encoded(ids_of[raw], before[ends] > before[begins])

    def _copy(self, private: str) -> tuple[tokenizers.Tokenizer, np.ndarray]:
        """(tokenizer with private characters for special tokens, the ids that its ids mean)."""
        first = ord(private[0])
        if first not in self._copies:
            copy = tokenizers.Tokenizer.from_str(self._json)
            copy.no_padding()
            copy.no_truncation()
            copy.encode_special_tokens = True
            specials = list(zip(private[ENDS + 1 :], self._special, strict=True))
            for character, token in specials:
                blanks = {name: token[name] for name in ("lstrip", "rstrip")}
                copy.add_tokens([tokenizers.AddedToken(character, normalized=False, **blanks)])
            ids: Mapping[str, int] = copy.get_vocab(with_added_tokens=True)
            ids_of = np.arange(max(ids.values()) + 1)
            for character, token in specials:
                ids_of[ids[character]] = token["id"]
            if len(self._copies) > 3:  # chats with such characters are rare
                self._copies.clear()
            self._copies[first] = copy, ids_of
        return self._copies[first]


class _Spellings(NamedTuple):
    """How texts spell tokens."""

    texts: tuple[str, ...]
    pattern: re.Pattern[str]
    """The character with which one begins."""
    starts: tuple[str, ...]
    rests: tuple[str, ...]

    @classmethod
    def of(cls, tokens: Iterable[str]) -> "_Spellings":
        """The spellings of tokens."""
        texts = tuple(tokens)
        starts = {text[:n] for text in texts for n in range(1, len(text))}
        rests = {text[n:] for text in texts for n in range(1, len(text))}
        begins = re.compile(f"(?=(?:{_any_of(texts).pattern})).", re.DOTALL)
        return cls(texts, begins, tuple(starts), tuple(rests))

    def broken(self, content: str, mark: str) -> str:
        """A text in which tokens are broken up, also those it could be a part of."""
        content = self.pattern.sub(lambda found: found[0] + mark, content)
        lead, core, trail = _parted(content)
        if core.startswith(self.rests) or any(core in text for text in self.texts):
            core = mark + core if core else core
        if core.endswith(self.starts):
            core += mark
        return f"{lead}{core}{trail}"


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of some texts, the longest first."""
    longest = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


def turns_of(messages: Sequence[Message], train_on: str) -> list[int]:
    """Indices of the turns to train on. A turn that says nothing is none."""
    role = USER if train_on == USER else ASSISTANT
    trained = (each.role == role and each.counts and each.content.strip() for each in messages)
    turns = [i for i, counts in enumerate(trained) if counts]
    if train_on == "completion":
        return [i for i in turns if i == len(messages) - 1]
    return turns


def _parted(content: str) -> tuple[str, str, str]:
    """A text as (blanks, rest, blanks), for a template may strip it."""
    rest = content.lstrip()
    core = rest.rstrip()
    return content[: len(content) - len(rest)], core, rest[len(core) :]


def _spans(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """(begin, end) of each pair of marks; None if they are not in pairs."""
    kinds = [kind for _, kind in places]
    if kinds != [BEGINS, ENDS] * (len(kinds) // 2):
        return None
    at = [place for place, _ in places]
    return list(zip(at[::2], at[1::2], strict=True))
