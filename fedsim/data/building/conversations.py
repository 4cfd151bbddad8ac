"""Conversations: a text belongs to whoever says it, and to whoever it is said to.

Transcripts, chats and forums name the speaker of a text, and not whom it is said to. That is taken
to be who spoke before: the last other speaker in the same conversation. The first one speaks to
nobody whom the data know.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fedsim.data.building.columns import Columns, ids_of, is_list, is_string, normalise, plain
from fedsim.data.building.orders import common_kind, keys_of, kind_of
from fedsim.data.building.readers import Part, complaints, raw
from fedsim.data.building.user_ids import refused
from fedsim.errors import DataError

ROWS_AT_ONCE = 65_536
# No column of a source is called so.
SPEAKER, SPOKEN_TO, WHERE, ORDER = (
    f"\x1f{name}" for name in ("speaker", "spoken to", "conversation", "order")
)


def owned(columns: Columns) -> Columns:
    """The columns of what `write` wrote."""
    order = None if columns.order is None else ORDER
    found = replace(columns, owners=(SPEAKER, SPOKEN_TO), conversation=None, turn=None)
    return replace(found, order=order)


def write(parts: Sequence[Part], columns: Columns, file: Path) -> None:
    """Writes the rows of all parts as Parquet, by conversation and turn, with both owners of each.

    All rows are in memory meanwhile. Rows of one turn stay in the order of the sources.
    Args: columns: of the parts; their user column has the speaker.
    Raises: DataError: a row has no turn, turns are of several kinds, or conversations have no ids.
    """
    assert columns.conversation is not None and columns.turn is not None, "of conversations"
    tables, turns = [], []
    for part in parts:
        for first_row, batch in raw(part, columns):
            if len(columns.user) == 1 and is_list(batch[columns.user[0]].type):
                raise refused(columns.blamed, "one speaker, got a list")
            speaking = replace(columns, text=())
            where, rows = batch[columns.conversation], range(first_row, first_row + len(batch))
            field = f"conversation_column={columns.conversation}"
            with complaints(part):
                said = normalise(batch, speaking, first_row)
                found: dict[str, Any] = {
                    SPEAKER: said["user_id"],
                    WHERE: ids_of(where, field, rows, Counter(), columns.normalise_ids),
                }
                if len(batch):
                    turns.append(_turns(plain(batch[columns.turn]), columns, first_row))
            if columns.order is not None:
                found[ORDER] = said["order"]
            tables.append(pa.table(found | {name: plain(batch[name]) for name in columns.text}))
    common_kind(map(kind_of, turns), f"turn_column={columns.turn}")
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException:
        shown = ",".join(columns.text)
        raise DataError.of("text_column", shown, "one type in all files") from None
    turn = pa.concat_arrays(turns).flatten()
    keys = {"where": table[WHERE]} | {str(i): key for i, key in enumerate(turn)}
    keys["row"] = pa.array(np.arange(len(table)))
    by = [(name, "ascending") for name in keys]
    table = _wide(table).take(pc.sort_indices(pa.table(keys), sort_keys=by))  # pyright: ignore
    speakers = table[SPEAKER].combine_chunks().dictionary_encode()
    number = last_other_speaker(_codes(table[WHERE]), _codes(table[SPEAKER]))
    spoken_to = speakers.dictionary.take(pa.array(number, mask=number < 0))
    table = table.drop_columns([WHERE]).append_column(SPOKEN_TO, spoken_to)
    pq.write_table(table, file, row_group_size=ROWS_AT_ONCE)


def _wide(table: pa.Table) -> pa.Table:
    """The table with columns that may take more than the 2 GiB which an array of strings can."""
    kinds = {}
    for field in table.schema:
        kinds[field.name] = kind = field.type
        if is_string(kind):
            kinds[field.name] = pa.large_string()
        elif pa.types.is_list(kind):
            kinds[field.name] = pa.large_list(kind.value_type)  # pyright: ignore
    return table.cast(pa.schema(kinds.items()))


def last_other_speaker(where: np.ndarray, speaker: np.ndarray) -> np.ndarray:
    """Who spoke before, in the same conversation, and is not the speaker; -1: nobody.

    Args: where, speaker: int [rows], in the order in which it was said; -1 is none.
    """
    fresh = np.diff(where, prepend=-2) != 0
    begins = fresh | (np.diff(speaker, prepend=-2) != 0)  # of a stretch of one speaker
    first = np.flatnonzero(begins)
    before = np.append(-1, speaker[first][:-1])
    before[fresh[first]] = -1
    found = before[np.cumsum(begins) - 1]
    return np.where((speaker >= 0) & (where >= 0), found, -1)


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each different value, -1 for none."""
    indices = column.combine_chunks().dictionary_encode().indices
    return indices.fill_null(-1).to_numpy().astype(np.int64)


def _turns(turn: pa.Array, columns: Columns, first_row: int) -> pa.Array:
    """The keys of turns; see `orders`. Raises: DataError: one is missing, or has no order."""
    field = f"turn_column={columns.turn}"
    keys = keys_of(turn, field, first_row, columns.turn_format)
    if keys.null_count:
        row = first_row + keys.is_null().index(True).as_py() + 1
        raise refused(field, f"a turn in every row, got none in row {row}")
    return keys
