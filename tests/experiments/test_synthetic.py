"""The made-up source has the shape it was asked for."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from experiments.harness import synthetic
from experiments.harness.synthetic import STACK_OVERFLOW, Shape, sizes, write


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 1.0])
def test_sizes_are_those_of_table_1(share):
    """Charles et al. 2024; DATA.md has the exact numbers."""
    shape = STACK_OVERFLOW.scaled(share)
    found = sizes(shape)
    assert found.sum() == round(share * 135_818_730) and len(found) == round(share * 342_477)
    assert abs(np.median(found) - 183) <= 1 and found.max() == shape.largest
    assert share < 1 or (found.min(), found.max()) == (1, 194_167)


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
