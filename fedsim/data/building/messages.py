"""Rows of chats, and of prompts with completions, become examples with their trained tokens.

A row is `messages` (or ShareGPT's `conversations`), a prompt and a completion (texts, or lists of
messages), or Alpaca's instruction, input and output. It gives one example, which depends on this
row alone.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedsim.config import BuildConfig
from fedsim.data.chat import (
    ASSISTANT,
    CALL_ID,
    CALLS,
    ROLES,
    TOOL,
    USER,
    ChatTokenizer,
    Encoded,
    Message,
    Template,
    Tools,
)
from fedsim.data.dataset import limits
from fedsim.data.store import MARKED
from fedsim.errors import BadChat, SlowTemplate

MESSAGES, COMPLETION, ALPACA = "messages", "completion", "alpaca"  # forms of rows of chats
TRAIN_ON = {MESSAGES: ASSISTANT, COMPLETION: COMPLETION, ALPACA: COMPLETION}  # by default
TOOLS = "tools"  # column beside a chat
OTHERS = ("function_call", "audio", "image", "images", "video", "videos", "attachments", "files")
"""What a turn may have besides text that no template gets."""
PARTS = ("image_url", "input_image", "input_audio", "file", "document", "tool_use", "tool_result")
"""What a list of parts may have besides text, and OTHERS."""
SAID = ("content", "value", "refusal")  # the last is OpenAI's, where the assistant refuses
REASONING = ("reasoning_content", "reasoning", "thinking")  # which some templates write, too
MARKS = {"weight": 0, "train": False, "loss": False, "masked": True}
"""Marks of a turn, with the value by which other programs leave it out of training."""
DOUBTFUL = ("mask", "loss_mask", "trainable", "train_detail", "ignore", "label", "labels")
"""Marks of a turn that mean one thing in one program and another in the next."""
BETWEEN = "\n\n"  # parts of Alpaca's prompt
OTHER_NAMES = {"human": USER, "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
OTHER_NAMES |= {"model": ASSISTANT}
HALF = re.compile("[\ud800-\udfff]")
HALVED = r"expected whole characters, got half of a surrogate pair such as \ud83d"


@dataclass(frozen=True)
class Chats:
    """Settings by which rows of chats become examples: the same for all parts."""

    form: str
    """The form of rows: messages, completion or alpaca."""
    train_on: str
    """As `config.BuildConfig` has it."""
    template: Template | None
    """None if the form needs none."""
    settings: BuildConfig
    """max_length, long_texts and skip_unknown."""

    def described(self) -> dict[str, Any]:
        """The settings for metadata.json."""
        skips = self.settings.skip_unknown
        found = {"form": self.form, "train_on": self.train_on, "skip_unknown": skips}
        if self.template is not None:
            source = self.template.source.encode()
            found["template_sha256"] = hashlib.sha256(source).hexdigest()
        return found


class Examples(NamedTuple):
    """Examples of the rows of a batch."""

    lengths: np.ndarray
    """int64 [examples]: number of tokens of each."""
    values: np.ndarray
    """Token ids of all examples end to end; of chats, marked ids (see `store.MARKED`)."""
    origin: np.ndarray
    """int64 [examples]: index of the row that each comes from."""


SKIPS = "; `skip_unknown=True` of `fedsim.data.build` leaves such rows out"
Bad = dict[int, tuple[str, str]]
"""Rows of a batch that cannot be encoded: why, and what leaves them out, if anything does."""


def chat_examples(
    rows: Sequence[str], chats: Chats, tokenizer: ChatTokenizer
) -> tuple[Examples, Counter[str], Bad]:
    """Make the examples of rows, up to one for which the template takes too long.

    Args:
      rows: each a JSON list of the values of the columns of `chats.form`.
    Returns:
      (examples, counts, bad): counts of tokens; of rows that are long, untrained (without a trained
      token, which are left out) and skipped; and of tokens that each of `limits` keeps.
    """
    bad: Bad = {}
    found: list[Encoded] = []
    origin: list[int] = []
    counts: Counter[str] = Counter()
    settings = chats.settings
    for index, row in enumerate(rows):
        try:
            whole = _encode(loads(row), chats, tokenizer)
        except (BadChat, RecursionError) as error:
            is_slow = isinstance(error, SlowTemplate)
            if is_slow or not settings.skip_unknown:
                bad[index] = str(error), "" if is_slow else SKIPS
            if is_slow:
                break
            counts["skipped"] += 1
            continue
        for most in reversed(limits(settings.max_length)):  # the last one is the example
            example = _shortened(whole, most, settings)
            is_trained = bool(example.trained[1:].any())
            counts[str(most)] += len(example.ids) * (is_trained or len(whole.ids) <= most)
        counts["tokens"] += len(whole.ids)
        counts["untrained"] += not is_trained
        counts["long"] += len(whole.ids) > settings.max_length
        if is_trained:
            found.append(example)
            origin.append(index)
    lengths = np.array([len(each.ids) for each in found], np.int64)
    values = [(2 * each.ids + each.trained).astype(MARKED) for each in found]
    joined = np.concatenate([np.zeros(0, MARKED), *values])
    return Examples(lengths, joined, np.array(origin, np.int64)), counts, bad


def _encode(values: list[Any], chats: Chats, tokenizer: ChatTokenizer) -> Encoded:
    """The tokens of a whole row."""
    train_on = chats.train_on
    if chats.form == MESSAGES:
        said, *tools = values
        return tokenizer.encode(messages_of(said), train_on, _tools_of(*tools))
    if chats.form == ALPACA:
        instruction, *inputs, output = values
        asked = [_text(instruction, "an instruction"), *(_text(x, "an input") for x in inputs)]
        prompt, completion = BETWEEN.join(filter(None, asked)), _text(output, "an output")
        if chats.template is None:
            return tokenizer.encode_pair(prompt + BETWEEN, completion, train_on)
        messages = [Message(USER, prompt), Message(ASSISTANT, completion)]
        return tokenizer.encode(messages, train_on)
    prompt, completion = map(_listed, values[:2])
    tools = _tools_of(*values[2:])
    if not isinstance(prompt, list) and not isinstance(completion, list):
        if tools:
            raise BadChat("expected lists of messages beside tools, got texts")
        pair = _text(prompt, "a prompt"), _text(completion, "a completion")
        return tokenizer.encode_pair(*pair, train_on)
    before, after = _turns_of(prompt, USER), _turns_of(completion, ASSISTANT)
    if train_on == COMPLETION:
        before, train_on = [each._replace(counts=False) for each in before], ASSISTANT
    return tokenizer.encode([*before, *after], train_on, tools)


def _shortened(whole: Encoded, most: int, settings: BuildConfig) -> Encoded:
    """The beginning of a long row; of a split one its end, if all that is trained on is there."""
    ids, trained = whole
    if len(ids) > most and settings.long_texts == "split" and not trained[: 1 - most].any():
        ids, trained = (np.concatenate([x[:1], x[1 - most :]]) for x in whole)
    return Encoded(ids[:most], trained[:most])


def messages_of(value: Any) -> list[Message]:
    """Read the turns of a chat.

    Args:
      value: a list of {role, content} or {from, value}, or its JSON.
    Raises: BadChat: it has another form, or a turn that no template knows.
    """
    if not (turns := turns_in(value)):
        raise BadChat("expected a list of turns")
    return [_message(turn, number) for number, turn in enumerate(turns, 1)]


def _message(turn: dict[str, Any], number: int) -> Message:
    where, role = f"in turn {number}", role_of(turn)
    if role not in ROLES:
        raise BadChat(f"expected a role among {', '.join(ROLES)} {where}")
    if called := [name for name in (*OTHERS, *REASONING) if turn.get(name)]:
        raise BadChat(f"expected text alone, got {called[0]} {where}")
    fields = _fields(turn, role, where)
    if "content" not in turn and "value" not in turn and CALLS not in fields:
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
    return Message(role, _text(content, f"a content {where}"), trained, fields)


def _fields(turn: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """Calls of tools, with arguments as objects, and the call that a result belongs to."""
    if role == TOOL:
        return _json_of({name: turn[name] for name in (CALL_ID, "name") if turn.get(name)}, where)
    if not (calls := turn.get(CALLS)):
        return {}
    if role != ASSISTANT:
        raise BadChat(f"expected {CALLS} of the assistant alone, got some {where}")
    calls = [_call(call, where) for call in _objects(calls, f"{CALLS} {where}")]
    return _json_of({CALLS: calls}, where) if calls else {}


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    inner = call.get("function", call)
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not name:
        raise BadChat(f"expected a function with a name in each of {CALLS} {where}")
    arguments = inner.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments) if arguments.strip() else {}
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        raise BadChat(f"expected arguments that are an object, or its JSON, {where}")
    inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if "function" in call else inner


def _tools_of(value: Any = None) -> Tools:
    """The tools beside a chat; None if there are none."""
    return _json_of(_objects(value or [], TOOLS), f"as {TOOLS}") or None


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    """A list of objects, or its JSON."""
    if isinstance(value, str):
        try:
            value = loads(value) or []
        except ValueError:
            value = None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadChat(f"expected a list of objects as {what}")
    return value


def _json_of(value: Any, where: str) -> Any:
    """The value, if all of its texts are whole."""
    if HALF.search(json.dumps(value, ensure_ascii=False)):
        raise BadChat(f"{HALVED} {where}")
    return value


def _listed(value: Any) -> Any:
    """The turns whose JSON a text is, as in cells of CSV files; else the value."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        turns = turns_in(value)
    except BadChat:
        return value
    keys = {"content", "value", CALLS}
    said = all(role_of(each) in ROLES and keys & each.keys() for each in turns)
    return turns if turns and said else value


def _turns_of(value: Any, role: str) -> list[Message]:
    return messages_of(value) if isinstance(value, list) else [Message(role, _text(value, role))]


def _text(value: Any, what: str) -> str:
    """A text, or a list of parts that are texts; null is none."""
    if value is None:
        return ""
    got = ""
    if isinstance(value, list):
        kinds = [each.get("type") if isinstance(each, dict) else None for each in value]
        got = next((f", got {kind}" for kind in kinds if kind in (*PARTS, *OTHERS)), "")
        if all(kind == "text" for kind in kinds):
            value = "".join(_text(each.get("text"), what) for each in value)
    if not isinstance(value, str):
        raise BadChat(f"expected text as {what}{got}")
    if HALF.search(value):
        raise BadChat(f"{HALVED} as {what}")
    return value


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
      value: a list of objects, or its JSON.
    Raises: BadChat: it has another form.
    """
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            got = "a text that json.dumps did not write"
            raise BadChat(f"expected a list of turns, got {got}") from None
    if not isinstance(value, list):
        got = "an object" if isinstance(value, dict) else "another value"
        raise BadChat(f"expected a list of turns, got {got}")
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict):
            raise BadChat(f"expected a role and a content in turn {number}")
    return value


def role_of(turn: dict[str, Any]) -> Any:
    """The role of a turn, which may be none that a template knows."""
    role = turn["role"] if turn.get("role") is not None else turn.get("from")
    return OTHER_NAMES.get(role, role) if isinstance(role, str) else role
