"""A private selection: what it costs is known before, counted once, and only the best is kept."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from refused import refuses
from test_verify import write_texts

from fedsim import accounting
from fedsim.accounting import SelectionEvent
from fedsim.budget import admission
from fedsim.budget.ledger import open_locked, place_of
from fedsim.data.building.build import build
from fedsim.plan import Caveat, Fact
from fedsim.run import checkpoint
from fedsim.run.console import Console
from fedsim.run.ledger import LedgerError
from fedsim.run.model_source import load_data
from fedsim.trust.budget import budget
from fedsim.tuning import jobs_of, selection
from fedsim.tuning.selection import Selection, evaluations_of, price, select, sentences


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.parquet")


@pytest.fixture
def settings(texts, tmp_path, monkeypatch):
    """Three candidates on small data, counted in a ledger of their own."""
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    own = {"algorithm": "uls", "data": str(texts), "epsilon": 1.0, "num_steps": 3, "batch_size": 24}
    own |= {
        "max_length": 24,
        "model": "micro",
        "strategy": "scan",
        "rows_per_pass": 2,
        "delta": 1e-3,
    }
    own |= {"engine": "local"}
    return [{**own, "learning_rate": rate} for rate in (0.1, 0.03, 0.01)]


def released_run_dir(best):
    return json.loads((best / "config.json").read_text())["run"]["run_dir"]


def priced(settings, out, how):
    jobs = jobs_of(settings, out)
    return price(jobs, load_data(jobs[0].run.data, None, print), how)


@pytest.mark.slow
@pytest.mark.privacy
def test_a_selection_is_counted_once_and_nothing_but_the_best_is_kept(settings, tmp_path):
    out = tmp_path / "out"
    found = select(settings, out, Selection(mean=2), Console())
    assert {path.name for path in out.iterdir()} == {
        *("best", "selection.json", "secret.json", "budget.json", "began.json")
    }
    assert found["epsilon_of_one"] < found["epsilon"]
    assert found["non_private"] == []
    with open_locked(place_of(None)) as ledger:
        (entry,) = ledger.entries.values()
    ((event, count),) = entry.planned
    assert isinstance(event, SelectionEvent) and count == 1 and entry.kind == "selection"
    assert found["epsilon"] == accounting.epsilon(entry.planned, found["delta"])
    spent = budget(place_of(None), None, delta=found["delta"])
    assert spent["epsilon"] == found["epsilon"] and spent["runs"][0]["state"] == "released"
    # Which of the trials it was is not released: a name is 64 bits of a keyed digest.
    assert re.fullmatch("[0-9a-f]{16}", Path(released_run_dir(out / "best")).name)
    best = json.loads((out / "best" / "summary.json").read_text())
    assert best["epsilon_holds"] == "trial" and found["eval/loss"] == best["final_eval_loss"]
    how = Selection(mean=2)
    assert select(settings, out, how, Console()) == found  # and no second time
    with refuses(f"out={out}", says="another out is for others"):
        select(settings, out, dataclasses.replace(how, mean=9.0), Console())


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("name", ["runs/mine/config.json", "notes.txt"])
def test_a_selection_removes_nothing_that_is_not_its_own(name, settings, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    with refuses(f"out={tmp_path}"):
        select(settings, tmp_path, Selection(), Console())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


@pytest.mark.slow
@pytest.mark.ci
def test_held_out_users_are_evaluated_with_noise_and_pay_for_it(settings, tmp_path):
    out, how = tmp_path / "out", Selection(mean=2, eval_epsilon=3.0)
    found = select(settings, out, how, Console())
    with open_locked(place_of(None)) as ledger:
        training, evaluation = ledger.entries.values()
    assert evaluation.kind == "evaluation" and evaluation.users != training.users
    spent = accounting.epsilon(evaluation.planned, found["eval_delta"])
    assert 3.0 * (1 - 1e-3) < spent <= 3.0
    best = json.loads((out / "best" / "summary.json").read_text())
    assert best["final_eval_loss"] == "nan" and math.isfinite(found["eval/loss"])
    metrics = (out / "best" / "metrics.jsonl").read_text()
    assert '"eval/loss"' not in metrics


@pytest.mark.privacy
def test_every_trial_is_scored_with_noise_of_its_own(key, monkeypatch):
    """Under one noise, the order of the losses would be exact, and their differences released."""
    monkeypatch.setattr(selection.directory, "load", lambda _: None)
    monkeypatch.setattr(selection, "last_model", lambda *_: (None,) * 4)
    monkeypatch.setattr(selection, "user_losses", lambda *_: np.full(9, 1.0))
    users = SimpleNamespace(vocab_size=256, num_users=9)
    data = SimpleNamespace(train=users, eval_users=users)
    priced = SimpleNamespace(evaluations=SimpleNamespace(noise_multiplier=3.0))
    trial = SimpleNamespace(summary={}, run=SimpleNamespace(run_dir=None))
    scores = [selection._score(trial, n % 20, data, priced, key, Console()) for n in range(40)]
    assert scores[:20] == scores[20:] and len(set(scores)) == 20


@pytest.mark.privacy
def test_a_selection_that_is_cut_off_at_its_end_is_not_made_again(settings, tmp_path, monkeypatch):
    out, how = tmp_path / "out", Selection(mean=2)
    with monkeypatch.context() as patched:
        patched.setattr(admission, "_settle", None)  # whose call fails
        with pytest.raises(TypeError):
            select(settings, out, how, Console())
    with monkeypatch.context() as patched:
        patched.setattr(selection, "_keep_best", None)
        with pytest.raises(TypeError):
            select(settings, out, how, Console())
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", None)
        with pytest.raises(TypeError):
            select(settings, out, how, Console())
    model = checkpoint.kept(out / "best")[-1].read_bytes()
    monkeypatch.setattr(selection, "outcomes_of", None)  # nothing is trained
    found = select(settings, out, how, Console())
    with open_locked(place_of(None)) as ledger:
        assert [entry.outcome for entry in ledger.entries.values()] == ["released"]
    assert {path.name for path in out.iterdir()} == {
        *("best", "selection.json", "secret.json", "budget.json", "began.json")
    }
    assert checkpoint.kept(out / "best")[-1].read_bytes() == model
    assert found["settings"]["learning_rate"] in (0.1, 0.03, 0.01)
    (out / "selection.json").unlink()
    with refuses(f"out={out}", says="a chosen model"):
        select(settings, out, how, Console())


@pytest.fixture
def killed(settings, tmp_path, monkeypatch):
    """The directory of a selection whose trials have ended, and that was killed then."""
    with monkeypatch.context() as patched:
        patched.setattr(selection, "_score", None)  # whose call fails
        with pytest.raises(TypeError):
            select(settings, tmp_path / "out", KILLED, Console())
    assert list((tmp_path / "out" / "runs").iterdir())
    return tmp_path / "out"


KILLED = Selection(mean=2)


@pytest.mark.slow
@pytest.mark.privacy
def test_a_selection_that_was_killed_goes_on_only_as_it_began(
    settings, killed, tmp_path, monkeypatch
):
    """Trials that have ended would be released under the price of other ones."""
    monkeypatch.setattr(selection, "outcomes_of", lambda *_, **__: [])  # nothing is trained
    write_texts(tmp_path / "others.parquet", num_users=41)
    cheaper = [{**each, "epsilon": 0.5} for each in settings]
    other_texts = [{**each, "data": str(tmp_path / "others.parquet")} for each in settings]
    for given, how, what in (
        (cheaper, KILLED, "out"),
        (settings[::-1], KILLED, "out"),
        (settings[:2], KILLED, "out"),
        ([*settings[:2], {**settings[2], "limit_epsilon": 9}], KILLED, "limit_epsilon"),
        (other_texts, KILLED, "out"),
        (settings, dataclasses.replace(KILLED, mean=3), "out"),
        (settings, dataclasses.replace(KILLED, shape=1.0), "out"),
        (settings, dataclasses.replace(KILLED, eval_epsilon=9.0), "out"),
    ):
        said = "the same for all" if what == "limit_epsilon" else "another out is for others"
        with refuses(what, says=said):
            select(given, killed, how, Console())
    with open_locked(place_of(None)) as ledger:
        assert ledger.num_lines == 1  # it began, and may go on
    shutil.copytree(killed, tmp_path / "copy")
    found = select(settings, killed, KILLED, Console())
    with pytest.raises(LedgerError, match="copy: is an older copy of a run"):
        select(settings, tmp_path / "copy", KILLED, Console())
    best = json.loads((killed / "best" / "summary.json").read_text())
    assert found["epsilon_of_one"] >= best["epsilon"]
    assert {path.name for path in killed.iterdir()} == {
        *("best", "selection.json", "secret.json", "budget.json", "began.json")
    }


@pytest.mark.privacy
def test_trials_that_do_not_say_what_they_began_with_are_refused(settings, killed):
    (killed / selection.BEGAN).unlink()  # as of an earlier version
    with refuses(f"out={killed}", says="an empty directory"):
        select(settings, killed, KILLED, Console())


def test_a_metric_without_noise_takes_held_out_users(settings, tmp_path):
    place = tmp_path / "data"
    build(write_texts(tmp_path / "t.parquet"), place, max_length=24, eval_users=0.0)
    for each in settings:
        each |= {"data": str(place), "max_length": None}
    with refuses("data", says="held-out users"):
        select(settings, tmp_path / "out", Selection(), Console())
    assert not (tmp_path / "out").exists()


@pytest.mark.privacy
def test_evaluations_have_the_delta_of_training_where_it_is_smaller(settings, tmp_path):
    how = Selection(eval_epsilon=2.0)
    found = priced(settings, tmp_path, how).evaluations
    assert found is not None and found.delta == 1e-6
    for each in settings:
        each["delta"] = 1e-9
    found = priced(settings, tmp_path, how).evaluations
    assert found is not None and found.delta == 1e-9


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"strict": True}, "strict=True"),
        ({"optimizer": "adamm"}, "optimizer=adamm"),
        ({"strategy": "vmap:8"}, "strategy=vmap:8"),
        ({"optimizer": "rmsprop", "learning_rate": None}, "learning_rate"),
        ({"model": "nowhere"}, "model=nowhere"),
    ],
)
def test_a_trial_that_would_be_refused_is_refused_before_anything_is_paid(
    settings, tmp_path, changed, what
):
    given = [{**each, **changed} for each in settings[:2]]
    with refuses(what):
        select(given, tmp_path / "out", Selection(mean=2), Console())
    assert not (tmp_path / "out").exists() and not (tmp_path / "ledger").exists()


@pytest.mark.privacy
def test_what_no_candidate_covers_is_part_of_the_claim(settings, tmp_path):
    for each, chosen in zip(settings, ("clip_norm", "", "clip_norm,num_steps"), strict=True):
        each |= {"algorithm": "els", "tuned_on_data": chosen, "group_size": None}
    how = Selection()
    with refuses("group_size=None", says="a number in a private selection"):
        priced(settings, tmp_path, how)
    for each in settings:
        each["group_size"] = 2
    found = priced(settings, tmp_path, how)
    facts = [Caveat(Fact.TUNED_ON_DATA, name) for name in ("clip_norm", "num_steps")]
    assert list(found.non_private) == facts  # each once
    said = f"Not covered by the guarantee: {'; '.join(map(str, facts))}."
    assert said in sentences(found)


@pytest.mark.privacy
def test_a_limit_holds_for_selections(settings, tmp_path):
    for each in settings:
        each["limit_epsilon"] = 1.2
    with refuses("limit_epsilon=1.2"):
        select(settings, tmp_path / "out", Selection(), Console())
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.privacy
def test_a_limit_holds_for_held_out_users_before_anybody_is_counted(settings, tmp_path):
    for each in settings:
        each["limit_epsilon"] = 8.0
    with refuses("limit_epsilon=8"):
        select(settings, tmp_path / "out", Selection(eval_epsilon=9.0), Console())
    with open_locked(place_of(None)) as ledger:
        assert not ledger.entries


@pytest.mark.privacy
@pytest.mark.parametrize("mean", [1.0, 8.0])
def test_the_noise_of_evaluations_spends_what_it_may(mean):
    found = evaluations_of(2.0, 1e-3, mean, 0.0)
    spent = accounting.epsilon(found.phases, 1e-3)
    assert 2.0 * (1 - 1e-3) < spent <= 2.0


@pytest.mark.parametrize("epsilon", [200.0, 1e-11])
def test_what_leaves_nothing_for_noise_is_named_as_it_was_given(epsilon):
    with refuses(f"eval_epsilon={epsilon}", says="the slack of its noise"):
        evaluations_of(epsilon, 1e-3, 8.0, 0.0)


@pytest.mark.parametrize("loss, score", [(math.nan, math.inf), (1.5, 1.5)])
def test_a_trial_whose_loss_is_no_number_is_never_the_best(loss, score):
    trial = SimpleNamespace(summary={"final_eval_loss": loss})
    public = SimpleNamespace(evaluations=None)
    assert selection._score(trial, 0, None, public, None, None) == score
