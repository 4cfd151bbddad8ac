"""Committed results are what their commands give, to the last digit that is written."""

import importlib
import json
from pathlib import Path

import pytest

from experiments.__main__ import place_of, stored
from experiments.benchmarks.common import circumstances
from experiments.harness import common, finetuning
from experiments.harness.records import as_written, read_rows
from experiments.harness.rows import CAME

NAME = "fig06_privacy_loss"
COMPUTED = (
    *("fig01_accounting", "fig02_variance", "conjecture", "lemma", "table_quoted"),
    *("table1_datasets", "table2_c4", "fig10_dataset_sizes"),
)
"""Experiments without a training. A quarter of an hour for all."""


class Elsewhere(finetuning.Arguments):
    """No run that was kept is used."""

    @property
    def runs(self) -> Path:
        return self.out / "runs"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not common.SHARED.is_dir(), reason="needs the stand-ins")
def test_a_loss_in_the_committed_table_is_what_its_settings_give(tmp_path):
    """The cheapest cell of each data set and algorithm; half an hour if there is no model yet."""
    record = json.loads((common.RESULTS / "small" / f"{NAME}.json").read_text())
    if record["machine"]["cpu"] != circumstances()["machine"]["cpu"]:
        pytest.skip("bits are those of one kind of CPU")
    papers = finetuning.stands_for
    rows = read_rows(common.RESULTS / "small" / f"{NAME}.csv")
    rows = [{**row, "dataset": papers(row["dataset"])} for row in rows]
    cheapest = {}
    for row in sorted(rows, key=lambda row: -row["budget"]):
        if row["local_steps"] == 1:  # what fedsim still computes
            cheapest[row["dataset"], row["algorithm"]] = row
    assert len(cheapest) == 4
    apart = (*CAME, "other_group", "local_steps", "local_learning_rate")
    cells = [{n: v for n, v in row.items() if n not in apart} for row in cheapest.values()]
    training = finetuning.COMPARISONS["small"].training
    arguments = Elsewhere("small", tmp_path, None, dry_run=False)
    found = finetuning.losses(cells, training, arguments)
    shown = [f"{row['loss']:.6g}" for row in found]
    assert shown == [f"{row['validation_loss']:.6g}" for row in cheapest.values()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not common.SHARED.is_dir(), reason="needs the stand-ins")
@pytest.mark.parametrize("name", COMPUTED)
def test_a_table_without_trainings_is_what_its_command_computes(name, tmp_path):
    module = importlib.import_module(f"experiments.{name}")
    scale = next(iter(stored(name)))
    rows = as_written(module.run(module.SETTINGS[scale]))
    common.write_csv(tmp_path / "again.csv", rows)
    committed = place_of(name, scale).with_suffix(".csv")
    assert (tmp_path / "again.csv").read_bytes() == committed.read_bytes()
