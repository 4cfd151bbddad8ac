"""Chunks hold every unit and every row once, whole, in few shapes."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fedsim.clipping import Buckets
from fedsim.clipping.packing import chunks
from fedsim.errors import ConfigError

LENGTHS = (4, 8, 16, 20)
BUCKETS = Buckets(LENGTHS, lambda b: b["sizes"], lambda b, n: b | {"tokens": b["tokens"][..., :n]})


def lane(rng, units, group, longest=20, density=0.7):
    """Rows whose real tokens are all different, 0 is padded, and a mask."""
    mask = rng.random((units, group)) < density
    sizes = rng.integers(longest + 1, size=(units, group)) * mask
    number = 1 + np.arange(units * group).reshape(units, group, 1)
    tokens = np.where(np.arange(20) < sizes[..., None], 100 * number + np.arange(20), 0)
    return {"tokens": tokens, "sizes": sizes}, mask


def rows_of(tokens, mask):
    """The real rows of a unit, without padding, in some order."""
    return sorted(tuple(row[row > 0]) for row in tokens[mask])


@settings(deadline=None, max_examples=200)
@given(
    units=st.integers(0, 30),
    group=st.integers(1, 5),
    longest=st.sampled_from([0, 3, 8, 17, 20]),
    density=st.sampled_from([0.0, 0.5, 1.0]),
    per_chunk=st.integers(1, 9),
    buckets=st.sampled_from([None, BUCKETS]),
    seed=st.integers(0, 2**32),
)
def test_every_unit_is_in_one_chunk_and_no_row_is_cut(
    units, group, longest, density, per_chunk, buckets, seed
):
    batch, mask = lane(np.random.default_rng(seed), units, group, longest, density)
    found = list(chunks(batch, mask, per_chunk, buckets))
    placed = np.concatenate([chunk.units for chunk in found] or [np.zeros(0, int)])
    assert sorted(placed) == list(range(units))
    partial = [chunk for chunk in found if len(chunk.units) < per_chunk]
    assert len({chunk.length for chunk in partial}) == len(partial)  # at most one of each length
    assert all(len(chunk.units) for chunk in found)
    for chunk in found:
        assert chunk.mask.shape == (per_chunk, group)
        assert chunk.batch["tokens"].shape == (per_chunk, group, chunk.length or 20)
        assert not chunk.mask[len(chunk.units) :].any()
        for place, unit in enumerate(chunk.units):
            own = chunk.mask[place]
            if buckets:  # its length is its own, whoever else is there
                longest = np.where(mask[unit], batch["sizes"][unit], 0).max()
                assert chunk.length == BUCKETS.holding(longest)
            expected = rows_of(batch["tokens"][unit], mask[unit])
            assert rows_of(chunk.batch["tokens"][place], own) == expected
            np.testing.assert_array_equal(
                chunk.batch["sizes"][place][own],
                (chunk.batch["tokens"][place] > 0).sum(axis=1)[own],
            )
    if buckets:
        assert {chunk.length for chunk in found} <= set(LENGTHS)
        for chunk in found:  # rows of a kind stand together, padding last
            assert (np.diff(np.where(chunk.mask, chunk.batch["sizes"], -1), axis=1) <= 0).all()


def test_a_row_longer_than_the_last_bucket_is_refused(rng):
    batch, mask = lane(rng, 4, 1, density=1)
    batch["sizes"][2] = 21
    for cut in (
        lambda: list(chunks(batch, mask, 4, BUCKETS)),
        lambda: BUCKETS.holding(batch["sizes"]),
    ):
        with pytest.raises(ConfigError, match="^sizes=21: expected <= 20, the last of `lengths`$"):
            cut()
    batch["sizes"][2], mask[2] = 21, False  # of padding it does not matter
    assert len(list(chunks(batch, mask, 4, BUCKETS)))
