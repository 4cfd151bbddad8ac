"""Reading rows by number: the same rows as plain Python, in memory and on disk."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fedsim.data import store
from fedsim.data.store import (
    OFFSETS,
    TOKENS,
    TokenReader,
    TokenWriter,
    encode_array,
    offsets_of,
)


def make(rng, num_rows, dtype=np.uint16):
    return [rng.integers(0, 300, rng.integers(0, 9)).astype(dtype) for _ in range(num_rows)]


def write(directory, rows, dtype=np.uint16, cuts=()):
    """Rows in a directory, written in pieces."""
    bounds = [0, *cuts, len(rows)]
    with TokenWriter(directory, dtype) as writer:
        for low, high in zip(bounds[:-1], bounds[1:], strict=True):
            piece = [np.zeros(0, dtype), *rows[low:high]]
            writer.write(np.array([len(row) for row in rows[low:high]], int), np.concatenate(piece))


def gather(reader, rows, length):
    tokens = np.zeros((len(rows), length), np.int32)
    return tokens, reader.copy_rows(rows, reader.values, tokens)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("cuts", [[], [0], [5, 5, 60]])
def test_rows_are_what_was_written(rng, monkeypatch, tmp_path, dtype, cuts):
    monkeypatch.setattr(store, "BLOCK_ROWS", 7)
    rows = make(rng, 100, dtype)
    write(tmp_path, rows, dtype, cuts)
    offsets, values = offsets_of(np.array([*map(len, rows)])), np.concatenate(rows)
    assert (tmp_path / OFFSETS).read_bytes() == encode_array(offsets)
    assert (tmp_path / TOKENS).read_bytes() == encode_array(values)
    for reader in (TokenReader.open(tmp_path), TokenReader(offsets, values)):
        assert reader.offsets.tolist() == offsets.tolist() and reader.values.dtype == dtype
        np.testing.assert_array_equal(reader.values, values)
        wanted = rng.integers(0, 100, 250)
        wanted[::5] = -1
        padded, sizes = gather(reader, wanted, 4)
        for row, each, size in zip(wanted, padded, sizes, strict=True):
            own = rows[row][:4].tolist() if row >= 0 else []
            assert each.tolist() == own + [0] * (4 - len(own)) and size == len(own)


def test_nothing_is_a_store_too(tmp_path):
    write(tmp_path, [])
    reader = TokenReader.open(tmp_path)
    assert reader.offsets.tolist() == [0] and reader.values.size == 0
    assert gather(reader, np.array([-1]), 3)[0].tolist() == [[0, 0, 0]]


def test_threads_read_at_the_same_time(rng, tmp_path):
    write(tmp_path, make(rng, 2_000))
    reader = TokenReader.open(tmp_path)
    wanted = [rng.integers(0, 2_000, 3_000) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda w: gather(reader, w, 8), wanted))
    for which, (padded, sizes) in zip(wanted, found, strict=True):
        again = gather(reader, which, 8)
        np.testing.assert_array_equal(padded, again[0])
        np.testing.assert_array_equal(sizes, again[1])


@pytest.mark.parametrize("name", [OFFSETS, TOKENS])
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-2],
        lambda b: b + b"xx",
        lambda b: b"",
        lambda b: b[:40],
        lambda b: b"x" * len(b),
        lambda b: b[:128] + b"x" * (len(b) - 128),  # under a whole header
        lambda b: b.replace(b"<", b">"),
        lambda b: b.replace(b"<u2", b"<i2").replace(b"<i8", b"<u8"),
        lambda b: b.replace(b"'<u2'", b"'|O'  ").replace(b"'<i8'", b"'|O' "),
    ],
)
def test_files_that_are_cut_off_or_of_other_things_are_refused(rng, tmp_path, name, damage):
    write(tmp_path, make(rng, 100))
    whole = (tmp_path / name).read_bytes()
    changed = damage(whole)
    (tmp_path / name).write_bytes(changed)
    if name == TOKENS and changed[:128] == whole[:128] and len(changed) == len(whole):
        TokenReader.open(tmp_path)  # other ids: only the fingerprint tells
    else:
        with pytest.raises(ValueError, match=r"\.npy"):
            TokenReader.open(tmp_path)
