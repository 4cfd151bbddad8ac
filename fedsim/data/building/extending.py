"""Extend a data set by later texts: of its users, and of new ones.

The tokenised rows of the data set are sorted again, before all new rows. An owner who is in a split
keeps the place there, and every row of the data set its split and its order: new rows of an old
owner come after the old ones, whatever the order column says. New owners come after all old ones,
and the rules of the build divide their rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import unidata_version

import numpy as np
import pyarrow as pa

from fedsim.data.building import user_ids
from fedsim.data.building.chats import Chats
from fedsim.data.building.columns import Columns
from fedsim.data.building.tokenised import RowWriter, as_bytes, pieces
from fedsim.data.dataset import EVAL_USERS, NONE_HELD, TEST, TRAIN, Dataset
from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import DataError

SETTINGS = "settings"
"""Entry of a data set's metadata with the settings of its build that are not the defaults."""
EXTENDED = "extended"
"""Entry with the number of builds that extended it."""
FILE = "rows-old.parquet"
FIRST = -(2**62)  # place of the first old row: those of new rows are >= 0
GROUPS = {"train": TRAIN, "eval_users": EVAL_USERS, "test": TEST}
Blocks = Iterator[tuple[np.ndarray, np.ndarray]]
"""Rows in blocks; see `Rows.blocks`."""
EACH_BUILD = "users_that_look_alike"  # count that is of all users, not of those of one build


def opened(directory: str | Path) -> Dataset:
    """Open a data set that is to be extended, and compare its bytes with its fingerprints.

    Raises:
      DataError: it was changed, or cannot be extended.
    """
    data = Dataset.open(directory)
    if SETTINGS not in data.metadata:
        expected = "data whose settings are known; build them again, which gives the same bytes"
        raise DataError.of("extend", data.path, expected)
    if data.metadata["columns"].get("conversation"):
        expected = "texts without conversation_column: whom one is said to may be in old sources"
        raise DataError.of("extend", data.path, expected)
    installed = {"unicode": unidata_version}
    if "public_suffix_list" in data.metadata:
        installed["public_suffix_list"] = user_ids.list_version()
    for name, version in installed.items():  # by another one, a user could have another id
        if (known := data.metadata.get(name, version)) != version:
            raise DataError.of("extend", data.path, f"ids by {name} {version}, got {known}")
    for store in data.splits().values():
        store.check()
    return data


def tokenizer_of(data: Dataset, spec: str) -> Tokenizer:
    """The tokenizer of a data set, with the name that it has there.

    Args:
      spec: the tokenizer that the build names.
    Raises:
      DataError: it is another one.
    """
    about, file = data.metadata["tokenizer"], str(data.tokenizer_path)
    if spec != file:
        named = Tokenizer.named(spec)
        same = spec == about["name"] if named is None else named.sha256 == about["sha256"]
        if not same:
            raise DataError.of("tokenizer", spec, f"{about['name']}, as extend={data.path} has it")
    tokenizer = Tokenizer.load(file, about["name"])
    tokenizer.trained_on_data = about["trained_on_data"]
    tokenizer.origin = about.get("origin", "")
    return tokenizer


def same_form(data: Dataset, columns: Columns, chats: Chats | None) -> Chats | None:
    """How rows of chats become examples, as in a data set; None if rows are texts.

    Args:
      columns: the columns of the new sources, as named or recognised.
      chats: how a build of the new sources alone would read them.
    Raises:
      DataError: the data set has other columns, or another chat template.
    """
    form, text = data.metadata["columns"].get("form", ""), data.metadata["columns"]["text"]
    if (columns.form, [*columns.text]) != (form, text):
        expected = f"{','.join(text)}, as extend={data.path} has it"
        raise DataError.of(columns.text_fields[0], ",".join(columns.text), expected)
    if chats is None or chats.template is None:
        return chats
    about = data.metadata["chats"]
    if chats.template.sha256 != about["template_sha256"]:
        raise DataError.of("chat_template", "another one", f"the one that extend={data.path} has")
    template = replace(chats.template, tokens=tuple(about["template_tokens"].items()))
    return replace(chats, template=template)


def expect_new(data: Dataset, files: tuple[dict[str, Any], ...]) -> None:
    """Raise DataError for a source that a data set was built from: its rows would count twice."""
    known = {each.get("sha256") for each in data.metadata["sources"]}
    for file in files:
        if file["sha256"] in known:
            expected = f"texts that extend={data.path} has not, which was built from this file"
            raise DataError.of("data", file["name"], expected)


def places(data: Dataset) -> pa.Table:
    """Owners of a data set by group: columns group, user_id, rank (their order), held and old.

    held has the number of rows among the held-out examples, or NONE_HELD; old, of all rows.
    """
    examples = data.eval_examples
    counts = {} if examples is None else _counts(examples)
    tables = []
    for name, group in GROUPS.items():
        if (store := data.splits().get(name)) is None:
            continue
        ids = store.owner_sets()
        taken = counts if group == TRAIN else {}
        held = np.array([taken.get(each, NONE_HELD) for each in ids], np.int64)
        columns = {"group": np.full(len(ids), group, np.int8), "user_id": pa.array(ids, "string")}
        old = np.diff(store.offsets) + np.maximum(held, 0)
        columns |= {"rank": np.arange(len(ids)), "held": held, "old": old}
        tables.append(pa.table(columns))
    return pa.concat_tables(tables)


def _counts(store: Any) -> dict[str, int]:
    return dict(zip(store.owner_sets(), np.diff(store.offsets).tolist(), strict=True))


def write_rows(data: Dataset, directory: Path, order: pa.DataType | None) -> None:
    """Write the rows of a data set as the build writes tokenised rows.

    Args:
      order: type of the order keys of new rows; None without them.
    """
    with RowWriter(directory / FILE, FIRST) as rows:
        for name in ("eval_examples", *GROUPS):  # an owner's held-out examples come first
            if (store := data.splits().get(name)) is None:
                continue
            ids, row = pa.array(store.owner_sets(), pa.string()), 0
            for block in store.blocks(0, store.num_examples):
                numbers = row + np.arange(len(block.lengths))
                row += len(numbers)
                owner = np.searchsorted(store.offsets, numbers, side="right") - 1
                values = block.values if block.flags is None else block.marked
                origin, sizes, first = pieces(block.lengths, values.itemsize)
                columns = {"user_id": ids.take(pa.array(owner[origin]))}
                if order is not None:
                    keys = pa.nulls(len(origin), order).flatten()
                    columns |= {f"order{i}": key for i, key in enumerate(keys)}
                group = np.full(len(origin), GROUPS.get(name, TRAIN), np.int8)
                columns |= {"group": pa.array(group), "first": first}
                rows.add(pa.table(columns | {"tokens": as_bytes(sizes, values)}))


def watched(blocks: Blocks, owners: pa.Table, report: Callable[[int], None]) -> Blocks:
    """Yield all rows as they are, and report the number of new rows that their owner had before.

    Args:
      blocks, owners: of `Rows`.
    """
    repeated = left = old = 0
    seen: set[int] = set()
    pairs = zip(owners["rows"].to_pylist(), owners["old"].to_pylist(), strict=True)
    for lengths, values in blocks:
        start = 0
        for end in np.cumsum(lengths).tolist():
            while not left:
                left, old = next(pairs)
                seen.clear()
            row, start = hash(values[start:end].tobytes()), end
            if old > 0:
                seen.add(row)
            repeated += old <= 0 and row in seen
            left, old = left - 1, old - 1
        yield lengths, values
    report(repeated)


def joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a data set that was extended.

    Args:
      before: its metadata.
      after: metadata of the build of the new sources.
    """
    counts = {
        name: count + (before["counts"].get(name, 0) if name != EACH_BUILD else 0)
        for name, count in {**dict.fromkeys(before["counts"], 0), **after["counts"]}.items()
    }
    both: dict[str, Any] = {name: [*before[name], *after[name]] for name in ("sources", "hub")}
    both["provenance"] = {**before["provenance"], **after["provenance"]}
    number = before.get(EXTENDED, 0) + 1
    return {**before, **after, **both, "counts": counts, EXTENDED: number}
