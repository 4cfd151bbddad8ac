"""Random allocation: who takes part when, and a run with it."""

import json

import numpy as np
import pytest
from refused import refuses
from test_verify import command as train_command, texts, verify  # noqa: F401 (a fixture)

from fedsim.accounting import allocated_event
from fedsim.cli.main import main
from fedsim.config import Algorithm, PrivacyConfig
from fedsim.keys import SecretKey
from fedsim.plan import allocated
from fedsim.run import ledger
from fedsim.sampling import Allocation


def test_everyone_takes_part_once_in_every_window_at_a_random_step():
    key, sampler, windows = SecretKey.create(seed=1), Allocation(30, 8, 4), 1500
    taken = np.zeros((windows, 4, 30), bool)
    for step in range(4 * windows):
        taken[step // 4, step % 4, sampler.draw(key, step)] = True
    assert (taken.sum(axis=1) == 1).all()
    assert np.abs(taken.mean(axis=0) - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / windows)
    first = taken[:, 0] - 0.25
    pairs = (first.T @ first / windows / (0.25 * 0.75))[np.triu_indices(30, 1)]
    assert np.abs(pairs).max() < 5 / np.sqrt(windows)  # of users
    successive = (first[1:] * first[:-1]).mean(axis=0) / (0.25 * 0.75)
    assert np.abs(successive).max() < 5 / np.sqrt(windows)  # of windows


def test_the_event_is_of_the_window():
    assert Allocation(30, 8, 4).event(1.5) == allocated_event(1.5, 4)
    assert Allocation(30, 8, 4).sampling_prob == 0.25


@pytest.mark.parametrize(
    "flags, what",
    [
        ({"participations": 2}, "participations=2"),
        ({"sampling": "allocation", "participations": 3}, "participations=3"),
        ({"sampling": "allocation", "noise": "correlated"}, "noise=correlated"),
    ],
)
def test_cells_without_a_guarantee_are_refused(flags, what):
    with refuses(what):
        PrivacyConfig(1.0, 10, **flags)


def test_participations_are_required():
    with refuses("participations=None"):
        allocated(Algorithm.ULS, PrivacyConfig(1.0, 10, sampling="allocation"), num_users=100)


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_is_accounted_verified_and_reported_so(texts, run_dir, capsys):  # noqa: F811
    flags = {"sampling": "allocation", "participations": 2}
    main([*train_command(texts, run_dir, **flags), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert summary["sampling"]["kind"] == "allocation"
    assert summary["sampling"]["participations"] == 2 and summary["sampling_prob"] == 1 / 3
    assert summary["expected_count"] == round(summary["num_users"] / 3)
    assert all(line["event"]["allocated"] for line in ledger.read(run_dir)[2:])
    names = ("num_steps", "sampling_prob", "noise_multiplier", "delta")
    own = [str(x) for n in names for x in (f"--{n.replace('_', '-')}", summary[n])]
    own += ["--participations", str(summary["sampling"]["participations"])]
    main(["account", "uls", *own, "--sampling", "allocation", "--json"])
    assert json.loads(capsys.readouterr().out)["epsilon"] == summary["epsilon"] <= 4
    for flag, steps in (("--replay", "the last 2 of 6 steps"), ("--whole", "all 6 steps")):
        code, found = verify(capsys, run_dir, flag)
        assert code == 0 and found["replay"][0] and found["draws"][0] and found["settings"][0]
        assert found["replay"][1].startswith(steps)
    main(["report", str(run_dir)])
    report = (run_dir / "report.md").read_text()
    assert "--sampling allocation --participations 2" in report and "random allocation" in report
