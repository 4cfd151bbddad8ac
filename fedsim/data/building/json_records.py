"""Objects of JSON files, one a line or all in one list, and columns of what they hold.

Read through json itself: Arrow's reader would take some texts for dates.
"""

import json
from collections.abc import Iterator
from typing import Any, TextIO

import pyarrow as pa

READ_CHARACTERS = 2**20  # of a list, at a time

Objects = Iterator[tuple[int, dict[str, Any]]]


def of_lines(lines: Iterator[bytes], before: int, encoding: str) -> Objects:
    """(size, object) of each line that is not blank. Raises: ValueError: naming the line."""
    for number, line in enumerate(lines, before + 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line.decode(encoding))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number}: {error}") from None
        yield len(line), _expect_object(row, f"line {number}")


def of_list(stream: TextIO) -> Objects:
    """(size, object) of each entry of the list that a file is; it is never in memory as a whole.

    Raises: ValueError: naming the entry.
    """
    decoder, text, at, number = json.JSONDecoder(), "", 0, 0

    def next_character() -> str:
        """The next one that is not white space, now at `at`; empty at the end of the file."""
        nonlocal text, at
        while True:
            at = next((i for i in range(at, len(text)) if not text[i].isspace()), len(text))
            if at < len(text):
                return text[at]
            text, at = stream.read(READ_CHARACTERS), 0
            if not text:
                return ""

    opening = next_character()
    assert opening == "[", "the caller has looked"
    at += 1
    while next_character() != "]":
        number += 1
        while True:
            try:
                row, end = decoder.raw_decode(text, at)
                break
            except RecursionError as error:
                raise ValueError(f"entry {number}: {error}") from None
            except ValueError as error:
                more = stream.read(max(READ_CHARACTERS, len(text)))
                if not more:
                    raise ValueError(f"entry {number}: {error}") from None
                text, at = text[at:] + more, 0
        yield end - at, _expect_object(row, f"entry {number}")
        at = end
        following = next_character()
        if following == ",":
            at += 1
        elif following != "]":
            raise ValueError(f"entry {number}: expected a comma or ] after it")
    at += 1
    if next_character():
        raise ValueError("expected nothing after the list")


def _expect_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
    return row


def names(record: dict[str, Any]) -> Iterator[str]:
    """The names of a record's fields, those inside others with a dot."""
    for key, value in record.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in names(value))


def value(record: dict[str, Any], name: str) -> Any:
    """The field of that name, or inside others of that path; None if there is none."""
    if name in record or "." not in name:
        return record.get(name)
    outer, _, inner = name.partition(".")
    return value(record[outer], inner) if isinstance(record.get(outer), dict) else None


def column(values: list[Any], name: str, first_row: int) -> pa.Array:
    """Numbers and strings mixed in one column become strings; beside lists, others
    become lists of one. Raises: ValueError: naming the row."""
    kinds = {type(value) for value in values} - {type(None)}
    if list in kinds and kinds <= {int, str, list}:
        values = [[v] if isinstance(v, int | str) else v for v in values]
        kinds = {list}
    if str in kinds and kinds <= {int, float, str}:
        values = [None if value is None else str(value) for value in values]
    try:
        return pa.array(values)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        rare = min(kinds, key=lambda kind: sum(type(value) is kind for value in values))
        row = next(i for i, value in enumerate(values) if type(value) is rare)
        raise ValueError(
            f"line {first_row + row + 1}, {name}: {' '.join(str(error).split())}"
        ) from None
