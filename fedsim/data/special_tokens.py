"""Begin and end tokens: those that a model's own files name.

They are looked for in this order, and a name or id that the vocabulary lacks is passed over:

1. `bos_token` and `eos_token` of tokenizer_config.json and special_tokens_map.json;
2. the template in tokenizer.json: what it puts before and after a text;
3. `bos_token_id` and `eos_token_id` of generation_config.json and config.json;
4. where no file names any: names that are in wide use, then the only special token there is.

Only a file called tokenizer.json has the others beside it. Wherever it is copied to alone, as into
built data, `with_template` has kept in it what they say.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.errors import ConfigError, DataError, brief
from fedsim.files import read_object

TOKENIZER = "tokenizer.json"
NAMES = ("tokenizer_config.json", "special_tokens_map.json")
IDS = ("generation_config.json", "config.json")
BEGIN_TOKENS = ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>")
END_TOKENS = ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")
BEGIN, END = "bos_token", "eos_token"
NOTHING: Mapping[str, Sequence[str | int]] = {}


class SpecialTokens(NamedTuple):
    """Ids of the tokens around an example."""

    begin: int
    end: int
    ends: frozenset[int]
    """All that end a text where a model writes one: a chat model has several."""


def beside(file: Path) -> dict[str, list[str | int]]:
    """What the files beside a tokenizer.json name, by field, likeliest first.

    Raises: DataError: one of them is no JSON object, or a field is no token.
    """
    found: dict[str, list[str | int]] = {}
    for name in (*NAMES, *IDS) if file.name == TOKENIZER else ():
        path = file.with_name(name)
        if not path.exists():
            continue
        try:
            record = read_object(path, "tokenizer")
        except ConfigError as error:
            raise DataError(str(error), field=error.field) from None
        for field in (BEGIN, END):
            key = field if name in NAMES else f"{field}_id"
            found.setdefault(key, []).extend(_listed(path, key, record.get(key)))
    return found


def _listed(path: Path, field: str, value: Any) -> Iterable[Any]:
    """The tokens of a field: null, a name, an object with one, an id, or a list of ids."""
    if value is None:
        return ()
    if field.endswith("_id"):
        values = value if isinstance(value, list) else [value]
        holds = all(type(number) is int for number in values)
        expected = "a token id, or a list of them"
    else:
        values = [value.get("content") if isinstance(value, dict) else value]
        holds, expected = isinstance(values[0], str), "the name of a token"
    if not holds:
        raise DataError.of("tokenizer", path, f"{expected} as {field}, got {brief(value)}")
    return values


def tokens_of(
    name: str,
    vocab: Mapping[str, int],
    record: Mapping[str, Any],
    named: Mapping[str, Sequence[str | int]] = NOTHING,
) -> SpecialTokens:
    """The begin and end tokens of a tokenizer.

    Args:
      vocab: ids of all tokens, added ones among them.
      record: its tokenizer.json.
      named: what `beside` found.
    Raises: DataError: nothing names any.
    """
    ids = set(vocab.values())

    def valid(tokens: Iterable[Any]) -> list[int]:
        numbers = [vocab.get(token) if isinstance(token, str) else token for token in tokens]
        return [number for number in numbers if number in ids]

    before, after = _template(record)
    named_ends = valid(named.get(f"{END}_id", ()))
    special = [token.get("id") for token in record["added_tokens"] if token.get("special")]
    only = valid(special) if len(special) == 1 else []
    begins = [*valid(named.get(BEGIN, ())), *valid(before), *valid(named.get(f"{BEGIN}_id", ()))]
    ends = [*valid(named.get(END, ())), *valid(after), *named_ends]
    begins = begins or valid(BEGIN_TOKENS) or ends or valid(END_TOKENS) or only
    ends = ends or valid(END_TOKENS) or begins
    if not begins:
        known = ", ".join(dict.fromkeys(BEGIN_TOKENS + END_TOKENS))
        raise DataError.of(
            "tokenizer",
            name,
            f"a begin or end token: {BEGIN} and {END} in a {NAMES[0]} beside {TOKENIZER}, or one "
            f"of {known}",
        )
    return SpecialTokens(begins[0], ends[0], frozenset([ends[0], *named_ends]))


def _template(record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Ids that a tokenizer.json puts before a text, and after it."""
    outer = record["post_processor"] or {}
    for template in outer.get("processors", [outer]):
        if "cls" in template:  # of the kinds BertProcessing and RobertaProcessing
            return [template["cls"][1]], [template["sep"][1]]
        around: tuple[list[int], list[int]] = [], []
        passed = False
        for part in template.get("single", ()):
            if "SpecialToken" in part:
                token = template["special_tokens"][part["SpecialToken"]["id"]]
                around[passed].extend(token["ids"])
            else:
                passed = True
        if passed:
            return around
    return [], []


def with_template(
    record: Mapping[str, Any], vocab: Mapping[str, int], special: SpecialTokens
) -> str | None:
    """A tokenizer.json that says by itself, in its template, which tokens are around a text; None
    if `record` does so already."""
    try:
        if tokens_of("", vocab, record)[:2] == special[:2]:
            return None
    except DataError:  # without the files beside it, none
        pass
    names = {number: token for token, number in vocab.items()}
    parts = [{"SpecialToken": {"id": names[number], "type_id": 0}} for number in special[:2]]
    first, second = ({"Sequence": {"id": x, "type_id": i}} for i, x in enumerate("AB"))
    template = {
        "type": "TemplateProcessing",
        "single": [parts[0], first, parts[1]],
        "pair": [parts[0], first, second, parts[1]],
        "special_tokens": {
            names[number]: {"id": names[number], "ids": [number], "tokens": [names[number]]}
            for number in special[:2]
        },
    }
    return json.dumps({**record, "post_processor": template})
