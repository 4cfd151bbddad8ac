"""Sorting by DuckDB: one result whatever the threads, and plain errors."""

import errno
import os
import signal
import threading
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsim.data.building import sorting, tokenised
from fedsim.data.building.build import build
from fedsim.data.building.sorting import owners_of, plain_errors, sorted_blocks, tokenised_rows
from fedsim.errors import Interrupted

IDS = ["a", "a\0", "a\0b", "a b", "ab", "Z", "ä", "\u2028", "\U0001f600", "a" * 40 + "1", "a" * 40]


def written(directory, rng, num_rows, most=9):
    """Rows in two files, and the same in Python: (id, order, rest of it, group, tokens)."""
    rows = []
    for number in range(2):
        order = [None if n == 0 else float(n) for n in rng.integers(0, 4, num_rows)]
        rest = [None if n is None else int(rng.integers(2)) for n in order]
        tokens = [rng.integers(0, 2**16, n).astype("<u2") for n in rng.integers(1, most, num_rows)]
        found = {
            "user_id": pa.array(rng.choice(IDS, num_rows).tolist()),
            "order0": pa.array(order, pa.float64()),
            "order1": pa.array(rest, pa.int64()),
            "group": pa.array(rng.integers(0, 2, num_rows), pa.int8()),
        }
        columns = [column.to_pylist() for column in found.values()]
        rows += zip(*columns, tokens, strict=True)
        found["tokens"] = pa.array([each.tobytes() for each in tokens], pa.large_binary())
        found["place"] = pa.array(number * tokenised.PLACES + np.arange(num_rows))
        pq.write_table(pa.table(found), directory / f"rows-{number:06d}.parquet", num_rows // 3)
    return rows


@pytest.mark.parametrize("threads, most", [(1, 9), (2, 900)])
def test_rows_are_sorted_as_python_sorts_them(tmp_path, rng, monkeypatch, threads, most):
    monkeypatch.setattr(sorting, "BLOCK_ROWS", 7)
    rows = written(tmp_path, rng, 200, most)
    last = float("inf")
    expected = sorted(
        rows,
        key=lambda row: (row[3], row[0].encode(), last if row[1] is None else row[1], row[2] or 0),
    )
    with tokenised_rows(tmp_path, threads) as found:
        owners = owners_of(found)
        blocks = [*sorted_blocks(found, np.dtype("<u2"), order=True)]
        for name in ("autoinstall_known_extensions", "autoload_known_extensions"):
            assert found.sql(f"SELECT current_setting('{name}')").fetchall() == [(False,)]
    lengths, values = (np.concatenate(part) for part in zip(*blocks, strict=True))
    assert lengths.tolist() == [len(row[4]) for row in expected]
    np.testing.assert_array_equal(values, np.concatenate([row[4] for row in expected]))
    of_owner = dict.fromkeys((row[3], row[0]) for row in expected)
    groups, ids = owners["group"].to_pylist(), owners["user_id"].to_pylist()
    assert [*zip(groups, ids, strict=True)] == [*of_owner]
    counts = [sum((row[3], row[0]) == owner for row in rows) for owner in of_owner]
    assert owners["rows"].to_pylist() == counts


def test_no_connection_shows_a_bar_of_progress():
    """It would be on stdout, among the results of a command."""
    shown = sorting.connect().sql("SELECT current_setting('enable_progress_bar')")
    assert shown.fetchall() == [(False,)]
    modules = Path(sorting.__file__).parent.glob("*.py")
    assert sum(file.read_text().count("duckdb.connect(") for file in modules) == 1


@pytest.mark.parametrize("name", ["a[1]", "it's *", "user_id=1", "?"])
def test_a_place_may_have_any_name(name, tmp_path):
    (tmp_path / name).mkdir()
    file = tmp_path / name / "x.jsonl"
    file.write_text('{"user_id": "ann", "text": "x"}\n')
    data = build(file, tmp_path / name / "out", eval_users=0, num_workers=1)
    assert data.train.user_ids() == ["ann"]


FULL = [
    (duckdb.IOException("Could not write all bytes: No space left on device"), errno.ENOSPC),
    (duckdb.IOException("could not write to file: File too large"), errno.EFBIG),
    (pa.ArrowInvalid("failed to offload data block of size 1 (temp_directory)"), errno.ENOSPC),
]


@pytest.mark.parametrize("error, number", FULL)
def test_errors_of_the_system_are_the_ones_they_are_and_no_other_is_shown(error, number):
    with pytest.raises(OSError, match=os.strerror(number)) as raised, plain_errors():
        raise error
    assert raised.value.errno == number
    for kind in (duckdb.OutOfMemoryException, duckdb.InvalidInputException):
        with pytest.raises(Interrupted) as raised, plain_errors():
            raise kind("at 'a person's text'")
        assert "person" not in str(raised.value) and raised.value.__cause__ is None


@pytest.mark.parametrize("read", ["to_arrow_table", "to_arrow_reader"])
def test_a_signal_while_duckdb_is_at_work_is_an_interruption(read, tmp_path, rng):
    written(tmp_path, rng, 3)
    many = "range(1_000_000)"
    query = f"SELECT sum(hash(a.range + b.range))::VARCHAR FROM {many} a, {many} b"
    with pytest.raises(KeyboardInterrupt), tokenised_rows(tmp_path, 1) as rows:
        threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
        found = getattr(rows.sql(query), read)()
        found.read_next_batch()
