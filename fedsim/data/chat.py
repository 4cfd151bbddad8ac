"""Chats as token ids: the model's own chat template, and which tokens are trained on.

A chat template is a program (Jinja) that comes with a model. It runs in a sandbox in a process with
limits of time and memory, as `transformers` runs it, and the ids are those of `transformers`, with
one exception: special tokens that a person spells in a message are text, and only those that the
template writes are special tokens. Added tokens that are not special, but that the template names,
count as special tokens too, except where the assistant writes them, such as <think>.

How that works: characters for private use mark, in the messages, where a turn that is trained on
begins and ends, and break up what spells a special token. In the rendered text, each special token
is the template's. It is replaced by a character for private use, which a copy of the tokenizer has
as a token. So a text is encoded once and as a whole, and trained tokens are found by the positions
of their characters. A chat that has one of these characters itself is refused.

Tools and calls of tools go to the template as JSON. A turn that calls a tool is found by a mark in
the name of its first call; it lasts from what asks for an answer to what the template writes after
the calls.
"""

import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from fedsim.data import limited
from fedsim.data.tokenizer import NAME_FILES, TEMPLATE, Tokenizer, read_beside, unknown_token
from fedsim.errors import BadChat, DataError, SlowTemplate, brief
from fedsim.files import expand_home

NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # that a template may name
RULE = 5  # version of how chats become tokens: a change that gives others gets another number
ASSISTANT, USER, TOOL = "assistant", "user", "tool"
ROLES = ("system", "developer", USER, ASSISTANT, TOOL)
CALLS, CALL_ID = "tool_calls", "tool_call_id"
FIRST = 0xF8000  # of the characters for private use: marks, then one for each special token
BREAK, BEGIN, END = map(chr, range(FIRST, FIRST + 3))
SIGN = chr(0x100000)  # another one, for what an assistant says


class Message(NamedTuple):
    """A turn of a chat."""

    role: str
    content: str
    counts: bool = True
    """False if it is not to be trained on, whoever speaks."""
    fields: Mapping[str, Any] = {}
    """What a template reads besides: tool_calls, tool_call_id and name."""


Tools = Sequence[Mapping[str, Any]] | None
"""Descriptions of the tools that the assistant may call, as JSON."""


class Encoded(NamedTuple):
    """A chat as token ids."""

    ids: np.ndarray
    """int64 [tokens]."""
    trained: np.ndarray
    """bool [tokens]: which tokens the model learns to predict."""


ASKED = Message(USER, "a")
CHANGED = "its template changes what a turn says, so that trained tokens cannot be told; expected "
CHANGED += "{% generation %} blocks in it"
NO_CONTENT = "its template does not write the `content` of the assistant's turns"
CHATML_TOOLS = "chatml-tools"
"""Name of the chat template that comes with fedsim, whatever files there are."""
NO_CALLS = "expected a chat_template that writes tool calls, as "
NO_CALLS += f"`chat_template='{CHATML_TOOLS}'` does,"


def _named_tokens(tokenizer: Path) -> dict[str, str]:
    """The tokens that the files of NAME_FILES name, the first one first: {"bos_token": "<s>"}."""
    found: dict[str, str] = {}
    for file in NAME_FILES:
        settings = read_beside(_beside(tokenizer, file))
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
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    @functools.cached_property
    def says_what_is_generated(self) -> bool:
        """True if blocks of the template mark what the assistant generates."""
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def check(self) -> None:
        """Compile the template. Raises: DataError: it is none."""
        try:
            limited.call("check", self.source)
        except (limited.LimitReached, limited.Refused) as error:
            expected = f"expected a Jinja template ({brief(str(error), 200)})"
            raise DataError(f"chat_template: {expected}", field="chat_template") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        *,
        begin: str = "",
        end: str = "",
        prompt: bool = False,
    ) -> str:
        """The text of a chat. The template decides what it does with a role, and with tools.

        Args:
          begin, end: what to put around what the template says is generated.
          prompt: end with the beginning of the assistant's next turn.
        Raises: BadChat: the template refuses the chat, or takes too long.
        """
        turns = [{"role": each.role, "content": each.content, **each.fields} for each in messages]
        variables = {"messages": turns, "tools": tools, "documents": None}
        variables |= {"add_generation_prompt": prompt, **dict(self.tokens)}
        try:
            return limited.call("render", self.source, variables, begin, end)
        except limited.LimitReached as error:
            raise SlowTemplate(f"its template takes more than {error}") from None
        except limited.Refused as error:
            raise BadChat(brief(str(error), 200)) from None


def template_of(tokenizer: Tokenizer, file: str | Path | None = None) -> Template | None:
    """The chat template of a tokenizer, which may be no template; None if there is none.

    Args:
      file: a template to take instead of the one among the tokenizer's files, or CHATML_TOOLS.
    Raises: DataError: a file is damaged.
    """
    beside = tokenizer.file
    if file is None and beside and (own := _beside(beside, TEMPLATE)).is_file():
        file = own
    if str(file) == CHATML_TOOLS:
        file = Path(__file__).with_name(f"{CHATML_TOOLS}.jinja")
    if file is not None:
        try:
            source = Path(expand_home("chat_template", file)).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = type(error).__name__
            raise DataError.of(
                "chat_template", file, f"{CHATML_TOOLS}, or a Jinja file ({reason})"
            ) from None
    else:
        settings = read_beside(_beside(beside, NAME_FILES[0])) if beside else {}
        source = settings.get("chat_template")
    tokens = _named_tokens(beside) if beside else {}
    tokens = tokens or {"bos_token": str(tokenizer.begin), "eos_token": str(tokenizer.end)}
    return Template(source, tuple(tokens.items())) if isinstance(source, str) else None


class ChatTokenizer:
    """A tokenizer that tells special tokens from texts that spell them."""

    def __init__(self, tokenizer: Tokenizer, template: Template | None = None):
        """Read the special tokens of a tokenizer, and those that a template names.

        Raises: DataError: the template is none.
        """
        if template is not None:
            template.check()
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
        tokens = [added[text] for text in added if text in {*special, *others}]
        for token in tokens:
            token["special"] = True  # so that the copy makes none of text
        texts = [token["content"] for token in tokens]
        self._character = {text: chr(FIRST + 3 + i) for i, text in enumerate(texts)}
        self._private = re.compile(f"[{BREAK}-{chr(FIRST + 2 + len(tokens))}]")
        self._written, self._others = _any_of(texts), _any_of(others)
        self._spellings, self._of_assistant = _Spellings(texts), _Spellings(special)
        quoted = re.finditer(r"""(['"])(.*?)\1|\.(\w+)""", template.source if template else "")
        found = {each[2] or each[3] for each in quoted}  # texts that it may look for
        self._compared = found | {CALLS, CALL_ID, "function", "name", "arguments"}
        unknown = unknown_token(record["model"])
        known = [token["id"] for token in tokens if token["content"] != unknown]
        self._reserved = np.array(known, np.int64)
        # The copy has characters for private use as tokens; `_ids` says which ones its ids mean.
        self._copy = tokenizers.Tokenizer.from_str(json.dumps(record))
        self._copy.encode_special_tokens = True
        for token in tokens:
            character, blanks = self._character[token["content"]], ("lstrip", "rstrip")
            about = {"normalized": False, **{name: token[name] for name in blanks}}
            self._copy.add_tokens([tokenizers.AddedToken(character, **about)])
        ids = self._copy.get_vocab(with_added_tokens=True)
        self._ids = np.arange(max(ids.values()) + 1)
        for token in tokens:
            self._ids[ids[self._character[token["content"]]]] = token["id"]

    def encode(self, messages: Sequence[Message], train_on: str, tools: Tools = None) -> Encoded:
        """Token ids of a chat.

        Args:
          train_on: "all", "assistant", or "completion", the last turn if it is the assistant's.
          tools: that the assistant may call.
        Raises: BadChat: there is no template, it refuses the chat, or does not say where a turn is.
        """
        plain, tools = self._plain(messages, tools)
        turns = turns_of(messages, train_on)
        if train_on == "all":
            text, _ = self._write(plain, tools)
            return self._encoded(text, [(0, len(text))])
        if self._template and self._template.says_what_is_generated:
            text, spans = self._write(plain, tools, begin=BEGIN, end=END)
            own = [i for i, each in enumerate(messages) if each.role == ASSISTANT]
            if spans is None or turns != own and len(spans) != len(own):
                raise BadChat("its template does not say which turn it generates")
            if len(spans) == len(own):
                spans = [span for i, span in zip(own, spans, strict=True) if i in turns]
            return self._encoded(text, spans)
        calling = [i for i in turns if plain[i].fields.get(CALLS)]
        turns = [i for i in turns if i not in calling]
        text, spans = self._said(plain, tools, turns)
        whole, ends = text, spans
        if turns and turns[-1] < len(plain) - 1:
            whole, ends = self._said(plain[: turns[-1] + 1], tools, turns[-1:])
        # What the template writes after the last of these turns, were it the end, is trained on.
        after = [whole[ends[-1][1] :] if turns else ""] * len(turns)
        if calling:
            called, endings = self._called(plain, tools, calling, text)
            spans, after = [*spans, *called], [*after, *endings]
        opening, size = self._opening
        for i, (start, end) in enumerate(spans):
            end += len(os.path.commonprefix([text[end : end + len(after[i])], after[i]]))
            spans[i] = start - size * text.endswith(opening, 0, start), end
        return self._encoded(text, spans)

    def encode_prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Token ids of a chat up to the beginning of the assistant's next turn, int64 [tokens].

        Raises: BadChat: there is no template, or it refuses the chat.
        """
        text, _ = self._write(self._plain(messages, None)[0], prompt=True)
        return self._encoded(text, []).ids

    def encode_pair(self, prompt: str, completion: str, train_on: str) -> Encoded:
        """Token ids of a prompt and its completion, between a begin and an end token.

        Args:
          train_on: "all", or "completion" (or "assistant").
        Raises: BadChat: a text has a character for private use.
        """
        self._expect_text(prompt + completion)
        # Nobody but the tokenizer says which texts are tokens here.
        prompt, completion = (self._tokens(self._others, text) for text in (prompt, completion))
        text, start = prompt + completion, 0 if train_on == "all" else len(prompt)
        learns = train_on == "all" or bool(completion.strip())  # without an answer not even to end
        found = self._encoded(text, [(start, len(text))] * learns)
        ids = np.concatenate([[self.begin_id], found.ids, [self.end_id]])
        return Encoded(ids, np.concatenate([[False], found.trained, [learns]]))

    def end_of_turn(self) -> int | None:
        """Id of the token that the template writes after what the assistant says; None without one.

        Raises: BadChat: as `encode`.
        """
        plain, _ = self._plain([ASKED, Message(ASSISTANT, "b")], None)
        text, spans = self._said(plain, None, [1])
        written = self._private.search(text, spans[0][1])
        return None if written is None else int(self._ids[self._copy.token_to_id(written[0])])

    @functools.cached_property
    def writes_tools(self) -> bool:
        """False if the template leaves out the tools that it gets."""
        assert self._template is not None, "has one"
        about = {"name": SIGN, "description": SIGN, "parameters": {"type": "object"}}
        try:
            return SIGN in self._template.render([ASKED], [{"type": "function", "function": about}])
        except BadChat:  # it says so of each row
            return True

    @functools.cached_property
    def _finds_special_tokens(self) -> bool:
        """True if a template's special tokens are also found when its text is encoded plainly."""
        assert self._template is not None, "has one"
        asked = [ASKED, Message(ASSISTANT, "b")]
        try:
            text, plain = self._write(asked)[0], self._template.render(asked)
        except SlowTemplate:
            raise
        except BadChat:  # it shows no chat of two turns
            return True
        own = self._ids[self._copy.encode(text, add_special_tokens=False).ids]
        self._copy.encode_special_tokens = False
        usual = self._copy.encode(plain, add_special_tokens=False).ids
        self._copy.encode_special_tokens = True
        return own.tolist() == usual

    @functools.cached_property
    def _opening(self) -> tuple[str, int]:
        """(what the template writes before the last answer; by how much more than what asks)."""
        try:
            closed, prompt = (self._write([ASKED], prompt=x)[0] for x in (False, True))
            before = self._write([ASKED, Message(ASSISTANT, SIGN)])[0].partition(SIGN)[0]
        except BadChat:
            return "", 0
        if prompt == closed or not before.startswith(prompt):
            return "", 0
        asks = prompt.removeprefix(closed)
        return asks + before[len(prompt) :], len(before) - len(prompt)

    def _plain(self, messages: Sequence[Message], tools: Tools) -> tuple[list[Message], Tools]:
        """Messages and tools without special tokens. Raises: BadChat: as `encode`."""
        if self._template is None:
            raise BadChat("expected texts, or a tokenizer with a chat template")
        if not self._finds_special_tokens:
            raise BadChat(
                "its tokenizer does not find the special tokens of the chat template; expected "
                "`normalized` and `single_word` of false for them in tokenizer.json"
            )
        said = [(each.content, each.fields) for each in messages]
        self._expect_text(json.dumps([said, tools], ensure_ascii=False))
        of = self._spellings_of
        contents = [each._replace(content=of(each).broken(each.content)) for each in messages]
        plain = [each._replace(fields=self._broken(each.fields, of(each))) for each in contents]
        plain_tools = self._broken(tools, self._spellings)
        if (plain, plain_tools) != (contents, tools):
            texts = (self._template.render(*x) for x in ((plain, plain_tools), (contents, tools)))
            if len({text.replace(BREAK, "") for text in texts}) > 1:
                changed = "its template changes what tools and their calls say"
                raise BadChat(f"{changed}, so that special tokens cannot be told from texts")
        return plain, plain_tools

    def _said(
        self, plain: Sequence[Message], tools: Tools, turns: Sequence[int]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a chat without marks, and the place of each of `turns` in it."""
        parts = [_parted(plain[i].content) for i in turns]

        def with_contents(contents: Iterable[str]) -> tuple[str, list[tuple[int, int]] | None]:
            changed = list(plain)
            for i, content in zip(turns, contents, strict=True):
                changed[i] = plain[i]._replace(content=content)
            return self._write(changed, tools)

        text, _ = self._write(plain, tools)
        if not turns:
            return text, []
        again, places = with_contents(f"{a}{BEGIN}{core}{END}{b}" for a, core, b in parts)
        if text != again or places is None or len(places) != len(turns):
            raise BadChat(NO_CONTENT if places == [] else CHANGED)
        # A template that strips the blanks of turns may write the same ones itself.
        leads = any(a for a, _, _ in parts) and text != with_contents(c + b for _, c, b in parts)[0]
        trails = any(b for *_, b in parts) and text != with_contents(a + c for a, c, _ in parts)[0]
        for i, ((start, end), (lead, _, trail)) in enumerate(zip(places, parts, strict=True)):
            start -= len(lead) if leads and text.endswith(lead, 0, start) else 0
            end += len(trail) if trails and text.startswith(trail, end) else 0
            places[i] = start, end
        return text, places

    def _called(
        self, plain: Sequence[Message], tools: Tools, turns: Sequence[int], text: str
    ) -> tuple[list[tuple[int, int]], list[str]]:
        """(the place of each of `turns`, which call tools, in a text; what would end each)."""
        marked = list(plain)
        for turn in turns:
            marked[turn] = _marked(plain[turn])
        again, names = self._write(marked, tools)
        if names == []:
            raise BadChat(NO_CALLS)
        if text != again or names is None or len(names) != len(turns):
            raise BadChat(CHANGED)
        places, endings = [], []
        for turn, (name, _) in zip(turns, names, strict=True):
            earlier = plain[:turn]
            alone, own = self._write([*earlier, marked[turn]], tools)
            other = self._write([*earlier, Message(ASSISTANT, SIGN)], tools)[0]
            before, _, after = other.partition(SIGN)
            opens = earlier and self._opening[0]
            prompt = self._write(earlier, tools, prompt=True)[0] if opens else ""
            start = len(os.path.commonprefix([alone, before]))
            asks = bool(prompt) and alone.startswith(prompt) and start >= len(prompt)
            end = len(alone) - len(os.path.commonprefix([alone[::-1], after[::-1]]))
            if not own or not (asks or before[start:].isspace() or start == len(before)):
                raise BadChat(CHANGED)
            shift = name - own[0][0]
            places.append((start + shift, end + shift))
            endings.append(alone[end:])
            if text[start + shift : end + shift] != alone[start:end]:
                raise BadChat(CHANGED)
        return places, endings

    def _expect_text(self, text: str) -> None:
        if self._private.search(text):
            raise BadChat(f"expected no character for private use from U+{FIRST:X} on")

    def _spellings_of(self, message: Message) -> "_Spellings":
        return self._of_assistant if message.role == ASSISTANT else self._spellings

    def _broken(self, value: Any, spellings: "_Spellings") -> Any:
        """JSON that spells no special token, but for texts that the template may look for."""
        if isinstance(value, str):
            is_word = value in self._compared and not self._written.search(value)
            return value if is_word else spellings.broken(value)
        if isinstance(value, Mapping):
            parts = ([self._broken(x, spellings) for x in item] for item in value.items())
            return {name: inner for name, inner in parts}
        if isinstance(value, list):
            return [self._broken(each, spellings) for each in value]
        return value

    def _tokens(self, pattern: re.Pattern[str], text: str) -> str:
        """A text with a private character for each token that is found in it."""
        return pattern.sub(lambda found: self._character[found[0]], text)

    def _write(
        self, messages: Sequence[Message], tools: Tools = None, **options
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """(what the template writes, with private characters; the places between marks)."""
        assert self._template is not None, "has one"
        text = self._template.render(messages, tools, **options)
        if not {*text}.isdisjoint(self._character.values()):
            raise BadChat("its template writes a character for private use")
        parts = re.split(f"([{BEGIN}{END}])", self._tokens(self._written, text).replace(BREAK, ""))
        marks, texts = parts[1::2], parts[::2]
        at = list(itertools.accumulate(map(len, texts[:-1])))
        pairs = marks == [BEGIN, END] * (len(marks) // 2)
        return "".join(texts), list(zip(at[::2], at[1::2], strict=True)) if pairs else None

    def _encoded(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        """Encode a text without marks. Tokens with a character in one of `spans` are trained."""
        encoded = self._copy.encode(text)
        raw = np.array(encoded.ids, np.int64)
        if np.isin(raw, self._reserved).any():
            raise BadChat("its tokenizer makes a special token of text")
        begins, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        ends = np.maximum(ends, begins + 1)
        marked = np.zeros(len(text) + 1, np.int64)
        for start, end in spans:
            marked[start:end] = 1
        before = np.concatenate([[0], np.cumsum(marked)])  # marked characters before each
        return Encoded(self._ids[raw], before[ends] > before[begins])


class _Spellings:
    """How texts spell tokens."""

    def __init__(self, tokens: Sequence[str]):
        self._tokens = tokens
        self._first = re.compile(f"(?=(?:{_any_of(tokens).pattern})).", re.DOTALL)
        cuts = [(text[:n], text[n:]) for text in tokens for n in range(1, len(text))]
        self._starts, self._rests = tuple({a for a, _ in cuts}), tuple({b for _, b in cuts})

    def broken(self, content: str) -> str:
        """A text in which tokens are broken up, also those it could be a part of."""
        content = self._first.sub(lambda found: found[0] + BREAK, content)
        lead, core, trail = _parted(content)
        if core.startswith(self._rests) or any(core in text for text in self._tokens):
            core = BREAK + core if core else core
        if core.endswith(self._starts):
            core += BREAK
        return f"{lead}{core}{trail}"


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of some texts, the longest first."""
    longest = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")


def turns_of(messages: Sequence[Message], train_on: str) -> list[int]:
    """Indices of the turns to train on. A turn without text and calls is none."""
    first = len(messages) - 1 if train_on == "completion" else 0
    own = [(i, each) for i, each in enumerate(messages) if each.role == ASSISTANT and each.counts]
    says = [i for i, each in own if each.content.strip() or each.fields.get(CALLS)]
    return [i for i in says if i >= first]


def _parted(content: str) -> tuple[str, str, str]:
    """A text as (blanks, rest, blanks), for a template may strip it."""
    rest = content.lstrip()
    core = rest.rstrip()
    return content[: len(content) - len(rest)], core, rest[len(core) :]


def _marked(message: Message) -> Message:
    """A turn with the name of its first call between marks."""
    first, *others = message.fields[CALLS]
    inner = first.get("function", first)
    inner = {**inner, "name": f"{BEGIN}{inner['name']}{END}"}
    first = {**first, "function": inner} if "function" in first else inner
    return message._replace(fields={**message.fields, CALLS: [first, *others]})
