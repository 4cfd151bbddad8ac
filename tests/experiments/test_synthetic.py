"""The made-up source has the shape it was asked for."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from experiments.harness import synthetic
from experiments.harness.synthetic import STACK_OVERFLOW, Shape, sizes, write


def test_sizes_are_table_1():
    """Charles et al. 2024, Table 1; DATA.md has the exact numbers."""
    found = sizes(STACK_OVERFLOW)
    assert (found.sum(), len(found)) == (135_818_730, 342_477)
    assert (found.min(), np.median(found), found.max()) == (1, 183, 194_167)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3])
def test_a_share_has_its_own_sizes(share):
    shape = STACK_OVERFLOW.scaled(share)
    found = sizes(shape)
    assert found.sum() == shape.num_examples == round(share * 135_818_730)
    assert abs(np.median(found) - 183) <= 1 and found.max() == shape.largest


def test_rows_are_mixed_and_the_same_for_the_same_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "FILE_ROWS", 3_000)
    shape = Shape(num_examples=10_000, num_users=200, median=30, largest=900)
    files = write(tmp_path / "a", shape)
    assert len(files) == 4
    tables = [pq.read_table(file) for file in files]
    again = [pq.read_table(file) for file in write(tmp_path / "b", shape)]
    assert all(table.equals(other) for table, other in zip(tables, again, strict=True))
    users = np.concatenate([table["user_id"].to_numpy() for table in tables])
    assert sorted(np.bincount(users).tolist(), reverse=True) == sizes(shape).tolist()
    assert all(len(np.unique(table["user_id"].to_numpy())) > 150 for table in tables[:3])
