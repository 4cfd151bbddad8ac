"""Candidates of a private selection: a grid or a list of settings, checked before any is run."""

import pytest
from refused import refuses
from test_cli import run

from fedsim.tuning import expand, jobs_of

BASE = {"data": "pydocs", "epsilon": 4, "num_steps": 3, "algorithm": "uls"}


def test_a_grid_is_every_combination_and_runs_go_with_it():
    grid = {"epsilon": [1, 4], "seed": [0, 1]}
    runs = [{"algorithm": "els"}, {"algorithm": "uls", "group_size": 2}]
    assert expand({"num_steps": 3, "grid": grid, "runs": runs}) == [
        {"num_steps": 3, **each, "epsilon": epsilon, "seed": seed}
        for each in runs
        for epsilon in (1, 4)
        for seed in (0, 1)
    ]
    assert expand({"epsilon": 1}) == [{"epsilon": 1}]


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"algorithm": "sgd"}, "algorithm=sgd"),
        ({"lerning_rate": 1}, "lerning_rate=1"),
        ({"run_dir": "x"}, "run_dir=x"),
        ({"epsilon": None}, "epsilon=None"),
        ({"epsilon": "four"}, "epsilon='four'"),
        ({"model": 3}, "model=3"),
        ({"epsilon": -1}, "epsilon=-1"),
    ],
)
def test_a_mistake_is_found_before_anything_is_run(changed, what, tmp_path):
    with refuses(what):
        jobs_of([BASE, {**BASE, **changed}], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_selection_says_that_its_held_out_users_are_public(tmp_path, capsys):
    file = tmp_path / "candidates.toml"
    file.write_text('data = "pydocs"\nnum_steps = 4\nalgorithm = "uls"\n[grid]\nepsilon = [2, 8]\n')
    code, _, err = run("select", file, "--out", tmp_path / "new", capsys=capsys)
    assert code == 2 and "public_eval=False: expected true" in err
    assert not (tmp_path / "new").exists()
