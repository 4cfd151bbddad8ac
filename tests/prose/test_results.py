"""Committed tables without trainings are what their commands compute, to the last digit."""

import importlib

import pytest

from experiments.__main__ import stored
from experiments.data import stand_ins
from experiments.harness.records import as_written, write_csv

COMPUTED = (
    *("fig01_accounting", "fig02_variance", "conjecture", "lemma", "table_quoted"),
    *("table1_datasets", "table2_c4", "fig10_dataset_sizes"),
)
"""A quarter of an hour for all."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not stand_ins.SHARED.is_dir(), reason="needs the stand-ins")
@pytest.mark.parametrize("name", COMPUTED)
def test_a_table_without_trainings_is_what_its_command_computes(name, tmp_path):
    module = importlib.import_module(f"experiments.{name}")
    scale, record = next(iter(stored(name).items()))
    rows = as_written(module.run(module.SETTINGS[scale]))
    write_csv(tmp_path / "again.csv", rows)
    assert (tmp_path / "again.csv").read_bytes() == record.with_suffix(".csv").read_bytes()
