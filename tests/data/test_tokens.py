"""Reading rows by number: the same rows as plain Python, whatever the shards."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from fedsim.data import shards, tokens
from fedsim.data.shards import encode_stream
from fedsim.data.tokens import TokenReader


def make(rng, num_rows, dtype=np.uint16):
    return [rng.integers(0, 300, rng.integers(0, 9)).astype(dtype) for _ in range(num_rows)]


def stream(rows, dtype=np.uint16):
    lengths = np.array([len(row) for row in rows], np.int64)
    return encode_stream(lengths, np.concatenate([np.zeros(0, dtype), *rows]))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("cuts", [[], [0], [5, 5, 60]])
def test_rows_are_what_was_written(rng, monkeypatch, dtype, cuts):
    monkeypatch.setattr(shards, "BATCH_ROWS", 16)
    monkeypatch.setattr(tokens, "BLOCK_ROWS", 7)
    monkeypatch.setattr(tokens, "BLOCK_TOKENS", 11)
    rows = make(rng, 100, dtype)
    bounds = [0, *cuts, 100]
    parts = [rows[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    reader = TokenReader([stream(part, dtype) for part in parts])
    assert (reader.num_rows, reader.num_tokens) == (100, sum(map(len, rows)))
    assert reader.dtype == dtype
    wanted = rng.integers(0, 100, 250)
    lengths, values = reader.take(wanted)
    assert lengths.tolist() == [len(rows[row]) for row in wanted]
    np.testing.assert_array_equal(values, np.concatenate([rows[row] for row in wanted]))
    wanted[::5] = -1
    padded, sizes = reader.gather(wanted, 4)
    for row, found, size in zip(wanted, padded, sizes, strict=True):
        own = rows[row][:4].tolist() if row >= 0 else []
        assert found.tolist() == own + [0] * (4 - len(own)) and size == len(own)
    assert reader.lengths(3, 90).tolist() == [len(row) for row in rows[3:90]]


def test_nothing_is_a_reader_too():
    reader = TokenReader([])
    assert reader.num_rows == 0 and reader.take(np.zeros(0, np.int64))[1].size == 0
    assert TokenReader([stream([])]).gather(np.array([-1]), 3)[0].tolist() == [[0, 0, 0]]


def test_threads_read_at_the_same_time(rng):
    rows = make(rng, 2_000)
    reader = TokenReader([stream(rows[:900]), stream(rows[900:])])
    wanted = [rng.integers(0, 2_000, 3_000) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda w: reader.gather(w, 8), wanted))
    for which, (padded, sizes) in zip(wanted, found, strict=True):
        again = reader.gather(which, 8)
        np.testing.assert_array_equal(padded, again[0])
        np.testing.assert_array_equal(sizes, again[1])


def test_shards_that_are_cut_off_or_compressed_are_refused(rng):
    whole = stream(make(rng, 100))
    with pytest.raises(pa.ArrowException):
        TokenReader([whole.slice(0, whole.size - 60)])
    table = pa.table({"tokens": [np.arange(500, dtype=np.uint16)] * 50})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    with pytest.raises(pa.ArrowInvalid, match="uncompressed"):
        TokenReader([sink.getvalue()])
