"""Cells side by side: what was computed is kept, whatever becomes of the others."""

import operator

import pytest

from experiments.benchmarks.common import processor
from experiments.harness.processes import compute
from experiments.harness.rows import kept

FAILS = {}


@pytest.mark.parametrize(
    ("processes", "cells"),
    [(1, [{"row": {"cell": 0}}, FAILS, {"row": {"cell": 2}}]), (2, [FAILS, {"row": {"cell": 0}}])],
    ids=["one after another", "side by side"],
)
def test_rows_are_kept_beside_a_cell_that_fails(processes, cells, tmp_path, monkeypatch, capsys):
    for name in ("NPROC", "JAX_PLATFORMS"):  # `compute` sets them
        monkeypatch.setenv(name, "as before")
    file = tmp_path / "rows.jsonl"
    with pytest.raises(KeyError, match="row"):
        compute(operator.getitem, cells, "row", file, 1.0, processes)
    assert kept(file) == [{"cell": 0, "cpu": processor()}]
    assert "failed" in capsys.readouterr().out
