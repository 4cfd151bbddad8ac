"""A subclass of ELS or ULS in place of the paper's algorithms."""

import json
import re
from pathlib import Path

import pytest
from refused import refuses

import fedsim
from fedsim.cli.main import main
from fedsim.trust import plan_of

SETTINGS = {"epsilon": 8, "num_steps": 2, "batch_size": 12, "group_size": 2, "max_length": 24}
SETTINGS |= {"model": "micro", "engine": "local", "strategy": "scan", "rows_per_pass": 2}
DATA = {"user_id": [f"user{u}" for u in range(40) for _ in range(4)], "text": ["red sky"] * 160}
PAGE = (Path(__file__).parents[2] / "docs/guide/python.md").read_text()


COHORT = "non_private/cohort_size"
namespace = {"fedsim": fedsim, "__name__": __name__}
exec(re.search(r"^```python\n([^`]*class InTurn.*?)^```$", PAGE, re.M | re.S)[1], namespace)
InTurn, NAME = namespace["InTurn"], f"{__name__}:InTurn"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedsim.train(InTurn, DATA, run_dir=tmp_path_factory.mktemp("own") / "run", **SETTINGS)


def test_its_event_is_what_epsilon_is_of_and_what_it_rests_on_is_stated(run):
    noise = run.summary["noise_multiplier"]
    event = fedsim.StepEvent(noise, 1.0, cycle=38 // 6)  # users, and those of a step
    assert fedsim.accounting.epsilon([(event, 2)], run.delta) == pytest.approx(8, rel=1e-3)
    assert run.epsilon == pytest.approx(8, rel=1e-3)
    lines = map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines())
    drawn = [line[COHORT] for line in lines if COHORT in line]
    assert drawn == [6, 6]
    (fact,) = run.summary["outside"]
    assert (fact["fact"], fact["of"]) == ("own-algorithm", NAME)
    found = {check.promise: check for check in run.verify()}
    assert all(check.holds for name, check in found.items() if name not in ("draws", "budget"))
    assert found["draws"].holds is None and NAME in found["outside"].found
    run.report()
    assert NAME in (run.run_dir / "report.md").read_text()
    assert plan_of(run.publish(run.run_dir.parent / "public")).own_algorithm == NAME


def test_only_the_same_class_goes_on(run, capsys):
    class Another(InTurn):
        pass

    again = {"run_dir": run.run_dir, "resume": True, **SETTINGS}
    assert fedsim.train(InTurn, DATA, **again).summary == run.summary
    for other in ("uls", Another):
        with refuses("algorithm", says=NAME):
            fedsim.train(other, DATA, **again)
    assert main(["verify", str(run.run_dir), "--replay"]) != 0
    assert NAME in [line for line in capsys.readouterr().out.splitlines() if "replay" in line][0]


@pytest.mark.parametrize("wrong, shown", [(dict, "dict"), ("sgd", "sgd")])
def test_what_is_no_algorithm_is_refused(wrong, shown, run_dir):
    with refuses(f"algorithm={shown}", says="subclass of fedsim.ELS"):
        fedsim.train(wrong, DATA, run_dir=run_dir, **SETTINGS)


def test_texts_with_several_owners_and_strict_runs_have_none(run_dir):
    shared = {"user_id": [["a", "b"], ["b"], ["c"]] * 20, "text": ["red sky"] * 60}
    few = {**SETTINGS, "batch_size": 2, "engine": "local"}
    with refuses("algorithm", says="several owners"):
        fedsim.train(InTurn, shared, run_dir=run_dir, **few)
    with refuses("algorithm", says=NAME):
        fedsim.train(InTurn, DATA, run_dir=run_dir, strict=True, delta=1e-6, **SETTINGS)
