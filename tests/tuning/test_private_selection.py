"""A private selection: what it costs is known before, counted once, and only the best is kept."""

import functools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

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
from fedsim.tuning.selection import price, sentences

select = functools.partial(selection.select, console=Console(), mean=2)
LEFT = {"best", "selection.json", "secret.json", "budget.json", "began.json"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.parquet")


@pytest.fixture
def settings(texts, tmp_path, monkeypatch):
    """Three candidates on small data, counted in a ledger of their own."""
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))
    own = {"algorithm": "uls", "data": str(texts), "epsilon": 1.0, "num_steps": 3, "batch_size": 24}
    own |= {"max_length": 24, "model": "micro", "strategy": "scan", "rows_per_pass": 2}
    own |= {"delta": 1e-3, "engine": "local"}
    return [{**own, "learning_rate": rate} for rate in (0.1, 0.03, 0.01)]


@pytest.mark.slow
@pytest.mark.privacy
def test_a_selection_is_counted_once_and_nothing_but_the_best_is_kept(settings, tmp_path):
    out = tmp_path / "out"
    found = select(settings, out)
    assert {path.name for path in out.iterdir()} == LEFT
    assert found["epsilon_of_one"] < found["epsilon"] and found["non_private"] == []
    with open_locked(place_of(None)) as ledger:
        (entry,) = ledger.entries.values()
    ((event, count),) = entry.planned
    assert isinstance(event, SelectionEvent) and count == 1 and entry.kind == "selection"
    assert found["epsilon"] == accounting.epsilon(entry.planned, found["delta"])
    spent = budget(place_of(None), None, delta=found["delta"])
    assert spent["epsilon"] == found["epsilon"] and spent["runs"][0]["state"] == "released"
    # Which of the trials it was is not released: a name is 64 bits of a keyed digest.
    began = json.loads((out / "best" / "config.json").read_text())["run"]["run_dir"]
    assert re.fullmatch("[0-9a-f]{16}", Path(began).name)
    best = json.loads((out / "best" / "summary.json").read_text())
    assert best["epsilon_holds"] == "trial" and found["eval/loss"] == best["final_eval_loss"]
    assert select(settings, out) == found  # and no second time
    with refuses(f"out={out}", says="another out is for others"):
        select(settings, out, mean=9.0)


@pytest.mark.privacy
@pytest.mark.parametrize("name", ["runs/mine/config.json", "notes.txt"])
def test_a_selection_removes_nothing_that_is_not_its_own(name, settings, tmp_path):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    with refuses(f"out={tmp_path}"):
        select(settings, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


def cut_off(monkeypatch, where, name, settings, out):
    """Begin a selection that ends where this is called."""
    with monkeypatch.context() as patched:
        patched.setattr(where, name, None)
        with pytest.raises(TypeError):
            select(settings, out)


@pytest.mark.privacy
def test_a_selection_that_is_cut_off_at_its_end_is_not_made_again(settings, tmp_path, monkeypatch):
    out = tmp_path / "out"
    for where, name in ((admission, "_settle"), (selection, "_keep_best"), (shutil, "rmtree")):
        cut_off(monkeypatch, where, name, settings, out)
    model = checkpoint.kept(out / "best")[-1].read_bytes()
    monkeypatch.setattr(selection, "outcomes_of", None)  # nothing is trained
    found = select(settings, out)
    with open_locked(place_of(None)) as ledger:
        assert [entry.outcome for entry in ledger.entries.values()] == ["released"]
    assert {path.name for path in out.iterdir()} == LEFT
    assert checkpoint.kept(out / "best")[-1].read_bytes() == model
    assert found["settings"]["learning_rate"] in (0.1, 0.03, 0.01)
    (out / "selection.json").unlink()
    with refuses(f"out={out}", says="a chosen model"):
        select(settings, out)


@pytest.mark.slow
@pytest.mark.privacy
def test_a_selection_that_was_killed_goes_on_only_as_it_began(settings, tmp_path, monkeypatch):
    """Trials that have ended would be released under the price of other ones."""
    killed = tmp_path / "out"
    cut_off(monkeypatch, selection, "_score", settings, killed)
    monkeypatch.setattr(selection, "outcomes_of", lambda *_, **__: [])  # nothing is trained
    write_texts(tmp_path / "others.parquet", num_users=41)
    began = (killed / selection.BEGAN).read_text()
    for given, how in (
        ([{**each, "epsilon": 0.5} for each in settings], {}),
        (settings[:2], {}),
        ([{**each, "data": str(tmp_path / "others.parquet")} for each in settings], {}),
        (settings, {"mean": 3}),
    ):
        with refuses("out", says="another out is for others"):
            select(given, killed, **how)
    with refuses("limit_epsilon", says="the same for all"):
        select([*settings[:2], {**settings[2], "limit_epsilon": 9}], killed)
    (killed / selection.BEGAN).unlink()  # trials that do not say what they began with
    with refuses(f"out={killed}", says="an empty directory"):
        select(settings, killed)
    (killed / selection.BEGAN).write_text(began)
    with open_locked(place_of(None)) as ledger:
        assert ledger.num_lines == 1  # it began, and may go on
    shutil.copytree(killed, tmp_path / "copy")
    found = select(settings, killed)
    with pytest.raises(LedgerError, match="copy: is an older copy of a run"):
        select(settings, tmp_path / "copy")
    best = json.loads((killed / "best" / "summary.json").read_text())
    assert found["epsilon_of_one"] >= best["epsilon"]
    assert {path.name for path in killed.iterdir()} == LEFT


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"strict": True}, "strict=True"),
        ({"optimizer": "adamm"}, "optimizer=adamm"),
        ({"strategy": "vmap:8"}, "strategy=vmap:8"),
        ({"optimizer": "rmsprop", "learning_rate": None}, "learning_rate"),
        ({"model": "nowhere"}, "model=nowhere"),
        ({"limit_epsilon": 1.2}, "limit_epsilon=1.2"),
    ],
)
def test_a_trial_that_would_be_refused_is_refused_before_anything_is_paid(
    settings, tmp_path, changed, what
):
    with refuses(what):
        select([{**each, **changed} for each in settings[:2]], tmp_path / "out")
    assert not list(tmp_path.glob("out/runs")) and not list(tmp_path.glob("ledger/budget.jsonl"))


def test_a_metric_takes_held_out_users(settings, tmp_path):
    place = tmp_path / "data"
    build(write_texts(tmp_path / "t.parquet"), place, max_length=24, eval_users=0.0)
    with refuses("data", says="held-out users"):
        given = [{**each, "data": str(place), "max_length": None} for each in settings]
        select(given, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.privacy
def test_what_no_candidate_covers_is_part_of_the_claim(settings, tmp_path):
    def priced():
        jobs = jobs_of(settings, tmp_path)
        return price(jobs, load_data(jobs[0].run.data, None, print), None)

    for each, chosen in zip(settings, ("clip_norm", "", "clip_norm,num_steps"), strict=True):
        each |= {"algorithm": "els", "tuned_on_data": chosen, "group_size": None}
    with refuses("group_size=None", says="a number in a private selection"):
        priced()
    for each in settings:
        each["group_size"] = 2
    found = priced()
    facts = [Caveat(Fact.TUNED_ON_DATA, name) for name in ("clip_norm", "num_steps")]
    assert list(found.non_private) == facts  # each once
    assert f"Not covered by the guarantee: {'; '.join(map(str, facts))}." in sentences(found)


@pytest.mark.parametrize("loss, score", [(math.nan, math.inf), (1.5, 1.5)])
def test_a_trial_whose_loss_is_no_number_is_never_the_best(loss, score):
    assert selection._score(SimpleNamespace(summary={"final_eval_loss": loss})) == score
