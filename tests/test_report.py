"""The report: what it claims follows from the ledger, whatever else the directory says."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from test_verify import command, edit_json, rewrite_ledger, write_texts

from fedsim import accounting, ledger, report
from fedsim.accounting import StepEvent
from fedsim.cli import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directories of finished runs by name; not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    texts = write_texts(directory / "texts.parquet")
    flags = {"private": {}, "shuffled": {"sampling": "shuffle"}, "open": {"epsilon": "inf"}}
    for name, changed in flags.items():
        main(command(texts, directory / name, **{"num-steps": 3, **changed}))
    return directory


def read(capsys, run_dir, out):
    """(JSON object, Markdown, HTML)."""
    capsys.readouterr()
    main(["report", str(run_dir), "--out", str(out), "--json"])
    found = json.loads(capsys.readouterr().out)
    return found, (out / "report.md").read_text(), (out / "report.html").read_text()


def test_the_claim_is_what_the_ledger_says(trained, tmp_path, capsys):
    found, text, page = read(capsys, trained / "private", tmp_path)
    summary = json.loads((trained / "private" / "summary.json").read_text())
    assert found["epsilon"] == summary["epsilon"]
    shown = float(re.search(r"epsilon = ([\d.]+)", found["claim"])[1])
    assert summary["epsilon"] <= shown < summary["epsilon"] + 1e-3  # an upper bound is rounded up
    assert summary["params_sha256"] in found["claim"]
    assert found["claim"] in text and found["claim"] in page
    factor = float(re.search(r"more than ([\d.,]+) times", found["claim"])[1].replace(",", ""))
    assert math.exp(summary["epsilon"]) <= factor < math.exp(summary["epsilon"]) + 0.02


def test_everything_to_be_reported_is_there(trained, tmp_path, capsys):
    _, text, page = read(capsys, trained / "private", tmp_path)
    for words in (
        *(
            "central",
            "adjacency",
            "unit of privacy",
            "Gaussian mechanism",
            "clipping",
            "accountant",
        ),
        *("sampling that was run", "sampling that was accounted", "tuning", "does not cover"),
        *("floating point", "Mironov 2012", "fedsim verify", "fedsim account", "jax", "--replay"),
        *("taken as public", "the seed (whoever knows it can take the noise away)", "ledger"),
    ):
        assert words in text and words in page, words
    assert page.count("<svg") == 2 and "Rényi" not in text
    secret = json.loads((trained / "private" / "secret.json").read_text())["secret"]
    assert secret not in text and secret not in page


def test_shuffling_and_no_noise_make_no_claim(trained, tmp_path, capsys):
    found, text, page = read(capsys, trained / "shuffled", tmp_path)
    label = "as if Poisson sampled: comparison only, not a guarantee"
    assert "no privacy is claimed" in found["claim"] and label in found["claim"]
    assert text.count(label) >= 3 and "recognises" not in text
    found, text, page = read(capsys, trained / "open", tmp_path)
    assert found["epsilon"] == "inf" and "no privacy is claimed for anyone" in found["claim"]
    assert "<svg" not in page


def test_a_run_that_has_not_ended_is_reported_as_far_as_it_went(trained, run_dir, tmp_path, capsys):
    shutil.copytree(trained / "private", run_dir)
    (run_dir / "summary.json").unlink()
    _, text, _ = read(capsys, run_dir, tmp_path)
    assert "the run has not ended" in text


@pytest.mark.parametrize("what", ["claim", "ledger", "noise"])
def test_a_run_that_is_not_what_it_says_gets_no_report(what, trained, run_dir, tmp_path, capsys):
    shutil.copytree(trained / "private", run_dir)
    if what == "claim":
        edit_json(run_dir / "summary.json", epsilon=0.1)
    elif what == "ledger":
        path = run_dir / "ledger.jsonl"
        path.write_text(path.read_text().replace("poisson", "Poisson"))
    else:
        rewrite_ledger(run_dir, lambda lines: [_noisier(line) for line in lines])
    with pytest.raises(SystemExit) as stop:
        main(["report", str(run_dir), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and "nothing to report: " in error and "violated" in error
    assert not (tmp_path / "out").exists()


def _noisier(line):
    if "event" in line:
        line["event"]["noise_multiplier"] += 1
    return line


def released(phases, num_steps, delta=1e-5):
    epsilon = accounting.epsilon(phases, delta)
    return report.Released(None, {}, None, [{}] * (num_steps + 1), phases, epsilon, [])


@pytest.mark.parametrize("sigma", [0.6, 2.0])
def test_nobody_recognises_more_than_the_gaussian_mechanism_allows(sigma):
    """One step with everyone: the best test is known, TPR = Phi(Phi^-1(FPR) + 1 / sigma)."""
    from scipy.stats import norm

    found = released([(StepEvent(sigma, 1.0), 1)], 1)
    for alarms in (0.001, 0.01, 0.05):
        best = norm.cdf(norm.ppf(alarms) + 1 / sigma)
        assert best <= report.most_recognised(found, alarms) <= best * 1.2 + 0.01


def test_epsilon_grows_with_the_steps_up_to_the_claim(trained):
    lines = ledger.read(trained / "private")
    plan = report.Plan.from_dict(lines[0]["head"]["plan"])
    phases = ledger.phases(lines)
    found = report.Released(
        None, {}, plan, lines, phases, accounting.epsilon(phases, plan.delta), []
    )
    steps, spent = report.over_steps(found)
    assert steps == [0, 1, 2, 3] and spent == sorted(spent)
    assert spent[-1] == pytest.approx(found.epsilon, rel=1e-3)
    epsilons, deltas = report.curve(found)
    assert np.all(np.diff(deltas) <= 0) and epsilons[-1] > found.epsilon
