"""Candidates of a private selection: a grid or a list of settings, checked before any is run."""

import json

import pytest
from refused import refuses
from test_cli import run

from fedsim.tuning import expand, jobs_of
from fedsim.tuning.selection import _name

BASE = {"data": "pydocs", "epsilon": 4, "num_steps": 3, "algorithm": "uls"}


def test_a_grid_is_every_combination_and_runs_go_with_it():
    spec = {
        "num_steps": 3,
        "grid": {"epsilon": [1, 4], "seed": [0, 1]},
        "runs": [{"algorithm": "els"}, {"algorithm": "uls", "group_size": 2}],
    }
    found = expand(spec)
    assert len(found) == 8 and found[0] == {
        "num_steps": 3,
        "algorithm": "els",
        "epsilon": 1,
        "seed": 0,
    }
    assert {(each["algorithm"], each.get("group_size")) for each in found} == {
        ("els", None),
        ("uls", 2),
    }
    assert expand({"epsilon": 1}) == [{"epsilon": 1}]


def test_a_run_is_known_by_what_it_computes(tmp_path):
    def name(**changed):
        return jobs_of([{**BASE, **changed}], tmp_path)[0].name

    assert name() == name(epsilon=4.0) == name(batch_size=128) == name(checkpoint_every=7)
    assert name() == name(delta=None)  # as if it was not given
    others = [name(epsilon=5), name(seed=1), name(algorithm="els"), name(data="other")]
    assert len({name(), *others}) == 5
    assert _name("uls", {}) == _name("uls", {"learning_rate": None})
    assert len(jobs_of([BASE, {**BASE, "epsilon": 4.0}], tmp_path)) == 1


@pytest.mark.parametrize("field, values", [("limit_epsilon", [4.0, 100.0]), ("num_lanes", [1, 2])])
def test_runs_that_differ_in_what_is_no_part_of_their_names_are_refused(field, values, tmp_path):
    settings = [{**BASE, field: value} for value in values]
    with refuses(f"{field}={values[1]}"):
        jobs_of(settings, tmp_path)
    assert len(jobs_of([settings[0]] * 2, tmp_path)) == 1


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"algorithm": "sgd"}, "algorithm=sgd"),
        ({"lerning_rate": 1}, "lerning_rate=1"),
        ({"run_dir": "x"}, "run_dir=x"),
        ({"epsilon": None}, "epsilon=None"),
        ({"epsilon": "four"}, "epsilon=four"),
        ({"num_steps": 2.5}, "num_steps=2.5"),
        ({"model": 3}, "model=3"),
        ({"epsilon": -1}, "epsilon=-1"),
    ],
)
def test_a_mistake_is_found_before_anything_is_run(changed, what, tmp_path):
    with refuses(what):
        jobs_of([BASE, {**BASE, **changed}], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_are_named_by_their_whole_path(tmp_path, monkeypatch):
    """What is computed has the same name wherever it is begun."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "micro"):
        (tmp_path / name).mkdir()
    found = [jobs_of([{**BASE, "model": name}], tmp_path)[0] for name in ("model", "micro")]
    assert [job.run.model.source for job in found] == [str(tmp_path / "model"), "micro"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # where there is no such directory
    assert jobs_of([{**BASE, "model": "model"}], tmp_path)[0].name == found[0].name


@pytest.fixture
def candidates(tmp_path):
    """A file of four candidates."""
    file = tmp_path / "candidates.toml"
    file.write_text(
        'data = "pydocs"\nnum_steps = 4\n[grid]\nepsilon = [2, 8]\n'
        '[[runs]]\nalgorithm = "els"\n[[runs]]\nalgorithm = "uls"\ngroup_size = 2\nseed = 1\n'
    )
    return file


def test_a_dry_run_lists_the_candidates(candidates, tmp_path, capsys):
    words = ("select", candidates, "--out", tmp_path / "new", "--dry-run")
    code, out, _ = run(*words, "--json", capsys=capsys)
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 4 and {row["epsilon"] for row in rows} == {2, 8}
    assert len(run(*words, capsys=capsys)[1].splitlines()) == len(rows)
    assert not (tmp_path / "new").exists()
