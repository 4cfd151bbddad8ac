# ruff: noqa: F401, F811
"""The run without a footnote: before its first noisy number, no byte depends on a user's texts."""

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from refused import refuses
from stores import store_of
from test_cli import texts, train_args

from fedsim.cli.main import main
from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.data import Dataset
from fedsim.engine import EngineError
from fedsim.errors import FedsimError, FileDamaged
from fedsim.keys import SecretKey
from fedsim.plan import ALL_COVERED, Caveat, Fact, Plan, defaults, ledger_head, planner
from fedsim.run import Console, directory, ledger
from fedsim.sampling import median_group_size, rank_error
from fedsim.training import Callback, open, prepare
from fedsim.training.prepare import prepare_run
from fedsim.training.trainer import launch as begin, show
from fedsim.trust.claim import Released
from fedsim.trust.evidence import Violated
from fedsim.trust.report import card_of
from fedsim.trust.verify import _outside, verify

KEY = SecretKey(b"\1" * 32, None, b"\2" * 32)
LENGTH, VOCAB, NUM_USERS = 24, 259, 40
PLANTED = {
    "other texts": [[9] * 20] * 3,
    "long texts": [[3] * LENGTH] * 3,
    "many texts": [[5, 6]] * 4000,
    "no texts": [],
}


def data_with(rows):
    """Users of 1 to 5 texts, and one with these."""
    users = {f"u{n}": [[1, 2, 3]] * (1 + n % 5) for n in range(NUM_USERS - 1)}
    return Dataset(store_of({**users, "v": rows}, LENGTH, VOCAB))


def published(algorithm, data, place, monkeypatch, capfd, *, callbacks=(), **flags):
    """What a run with this data writes and shows before its first step, without its times."""
    real = SecretKey.create
    monkeypatch.setattr(open, "load_data", lambda *_: data)
    monkeypatch.setattr(
        open.SecretKey, "create", lambda seed=None, *_: KEY if seed is None else real(seed)
    )
    of_run = {"data": "made up", "run_dir": place / "run", "model": "micro", "engine": "local"}
    of_run |= {"strategy": "scan", "rows_per_pass": 1, "log_to": ()}
    of_run["budget_ledger"] = place / "budget"
    names = {*of_run, "strict", "seed", "limit_epsilon"} & flags.keys()
    run = run_config(**of_run | {name: flags.pop(name) for name in names})
    privacy = PrivacyConfig(**{"epsilon": 8.0, "num_steps": 4, "batch_size": 8, **flags})
    capfd.readouterr()
    with open.open_run(algorithm, privacy, run, Console()) as opened:
        prepared = prepare_run(opened, callbacks=callbacks)
        show(prepared)
        begin(prepared)
    shown = capfd.readouterr().err
    config = json.loads((run.run_dir / "config.json").read_text())
    # Seals are keyed: whoever has not the key cannot tell them from random bits.
    plan, sealed = prepared.plan, [prepared.plan.data_seal, prepared.plan.drawn_once]
    assert plan.seeded or plan.data_seal == KEY.seal(data.train.fingerprint)
    plan = dataclasses.replace(plan, data_seal="", drawn_once="")
    head = ledger_head(plan, config_sha256="", key_seal="")
    text = json.dumps([head, config, shown])
    for each in filter(None, (*sealed, str(place))):
        text = text.replace(each, "")
    return text, plan


@pytest.fixture
def pair(tmp_path, monkeypatch, capfd):
    """What two runs publish whose data differ in one user, and the plan of the first."""

    def compare(algorithm, rows, **flags):
        told = (monkeypatch, capfd)
        one, plan = published(algorithm, data_with([[7, 8]]), tmp_path / "a", *told, **flags)
        other, _ = published(algorithm, data_with(rows), tmp_path / "b", *told, **flags)
        return one, other, plan

    return compare


OPTIONS = {"poisson": {}, "cyclic": {"bands": 2}, "allocation": {"participations": 2}}
CELLS = [(algorithm, sampling, "many texts") for algorithm in Algorithm for sampling in OPTIONS]
CELLS.remove((Algorithm.ELS, "allocation", "many texts"))
CELLS += [(Algorithm.ULS, "poisson", name) for name in PLANTED]


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("algorithm, sampling, rows", CELLS)
def test_a_user_changes_no_byte_before_the_first_noise(algorithm, sampling, rows, strict, pair):
    flags = {"group_size": 2, "sampling": sampling, "strict": strict, **OPTIONS[sampling]}
    one, other, plan = pair(algorithm, PLANTED[rows], **flags)
    assert one == other and ALL_COVERED in one and not plan.caveats


@pytest.mark.privacy
@pytest.mark.parametrize("share, group_size", [(0.2, 3), (defaults.MAX_SHARE, 2)])
def test_els_draws_its_group_size_privately_or_takes_a_public_one(
    share, group_size, pair, monkeypatch
):
    monkeypatch.setattr(defaults, "private_median", lambda *_: 3)  # the first noisy number
    monkeypatch.setattr(defaults, "MAX_SHARE", share)  # these are few users
    one, other, plan = pair(Algorithm.ELS, PLANTED["many texts"], strict=True, batch_size=50)
    assert one == other and plan.group_size == group_size and not plan.caveats
    cost = rank_error(1.0) / (defaults.MISS * NUM_USERS)
    assert plan.group_size_epsilon == (cost if group_size == 3 else None)


REFUSED = {
    "no held-out users": ({"eval_epsilon": 1.0}, "eval_epsilon"),
    "noise that takes all of delta": ({"epsilon": 300.0}, "epsilon"),
    "no place for the ledger": ({"budget_ledger": Path("/dev/null/ledger")}, "budget_ledger"),
    "more than the limit": ({"limit_epsilon": 7.0}, "limit_epsilon"),
    "a footnote": ({"strict": True, "seed": 3}, "seed"),
}
BROKEN = {
    "fedsim.data.UserStore.check": FileDamaged,
    "fedsim.engine.worker.LocalEngine.ready": EngineError,
    "fedsim.training.prepare.choose_strategy": EngineError,
    "fedsim.training.prepare.expect_affordable": FedsimError,
    "fedsim.training.prepare.make_plan": FedsimError,
}


@pytest.fixture
def nothing_is_drawn(tmp_path, monkeypatch):
    """No private draw is made, and neither ledger nor run are written."""
    drawn = []
    monkeypatch.setattr(defaults, "private_median", lambda *_: drawn.append(1) or 3)
    yield
    assert not drawn and not (tmp_path / "budget").exists() and not (tmp_path / "run").exists()


@pytest.mark.privacy
@pytest.mark.usefixtures("nothing_is_drawn")
@pytest.mark.parametrize("case", REFUSED)
def test_who_is_refused_has_paid_for_no_draw(case, tmp_path, monkeypatch, capfd):
    flags, field = REFUSED[case]
    flags = {"group_size_epsilon": 0.5, **flags}
    with refuses(field):
        published("els", data_with([[7, 8]]), tmp_path, monkeypatch, capfd, **flags)


@pytest.mark.privacy
@pytest.mark.usefixtures("nothing_is_drawn")
@pytest.mark.parametrize("name, error", BROKEN.items())
def test_neither_has_a_run_that_something_else_ends(name, error, tmp_path, monkeypatch, capfd):
    def broken(*_, **__):
        raise error(name)

    monkeypatch.setattr(name, broken)
    with pytest.raises(error, match=name):
        data = data_with([[7, 8]])
        published("els", data, tmp_path, monkeypatch, capfd, group_size_epsilon=0.5)


@pytest.mark.privacy
def test_a_draw_is_paid_before_it_is_made(tmp_path, monkeypatch, capfd):
    """A run that is killed by it counts."""

    def draw(*_):
        assert (tmp_path / "budget").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(defaults, "private_median", draw)
    with pytest.raises(KeyboardInterrupt):
        data = data_with([[7, 8]])
        published("els", data, tmp_path, monkeypatch, capfd, group_size_epsilon=0.5)


PUT_BACK = [
    (planner, "public_examples", lambda privacy, users: users.num_examples),
    (
        defaults,
        "private_median",
        lambda sizes, *_: median_group_size(sizes) + int(sizes.max() > 100),
    ),
    (defaults, "facts_of", lambda _, data: [Caveat(Fact.CALLBACK, str(data.train.num_examples))]),
]


@pytest.mark.privacy
@pytest.mark.parametrize("where, name, planted", PUT_BACK)
def test_a_footnote_that_is_put_back_is_noticed(where, name, planted, pair, monkeypatch):
    monkeypatch.setattr(where, name, planted)
    monkeypatch.setattr(defaults, "MAX_SHARE", 0.2)
    one, other, _ = pair(Algorithm.ELS, PLANTED["many texts"])
    assert one != other


class Reader(Callback):
    reads_non_private = True


METADATA = {
    Fact.TOKENIZER: {"tokenizer": {"public": False}},
    Fact.MIN_EXAMPLES: {"rules": {"min_examples": 2}},
    Fact.SKIP_UNKNOWN: {"settings": {"skip_unknown": True}},
}
CAUSES = {
    Fact.NO_NOISE: {"epsilon": float("inf"), "group_size": 2},
    Fact.KNOWN_SEED: {"seed": 5},
    Fact.COUNTS: {"adjacency": "add-or-remove", "delta": 1e-6},
    Fact.DELTA: {"adjacency": "add-or-remove"},
    Fact.GROUP_SIZE: {"epsilon": float("inf")},
    Fact.TUNED_ON_DATA: {"tuned_on_data": "clip_norm"},
    Fact.CALLBACK: {"callbacks": [Reader()]},
    **dict.fromkeys(METADATA, {}),
}
CAUSED_ELSEWHERE = {
    Fact.OWNERS: "tests/test_shared_runs.py",
    Fact.OWN_TASK: "tests/library/test_own_task.py",
    Fact.OWN_ALGORITHM: "tests/library/test_own_algorithm.py",
    Fact.TRIAL: "tests/tuning/test_private_selection.py",
    Fact.MODEL: "tests/models/test_lora.py",
    Fact.SAMPLED_NORMS: "tests/tuning/test_recommend.py",
}


def test_every_fact_is_caused_by_a_test():
    assert not CAUSES.keys() & CAUSED_ELSEWHERE and {*CAUSES, *CAUSED_ELSEWHERE} == {*Fact}


def data_of(fact):
    return dataclasses.replace(data_with([[7, 8]]), metadata=METADATA.get(fact, {}))


@pytest.mark.privacy
@pytest.mark.parametrize("fact", CAUSES)
def test_strict_refuses_each_fact_before_anything_is_paid(fact, tmp_path, monkeypatch, capfd):
    with refuses({Fact.DELTA: "adjacency", Fact.GROUP_SIZE: "epsilon"}.get(fact, fact.setting)):
        told = (tmp_path, monkeypatch, capfd)
        published("els", data_of(fact), *told, strict=True, **CAUSES[fact])
    assert not (tmp_path / "run").exists() and not (tmp_path / "budget").exists()


@pytest.mark.privacy
@pytest.mark.parametrize("reworded", [False, True])
@pytest.mark.parametrize("fact", CAUSES)
def test_plan_verify_and_card_name_each_fact_whatever_its_words(
    fact, reworded, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(defaults, "MAX_DELTA", 1.0)  # as for many users
    data, flags = data_of(fact), CAUSES[fact]
    text, plan = published("els", data, tmp_path, monkeypatch, capfd, **flags)
    if reworded:
        for each in Fact:
            monkeypatch.setattr(each, "text", f"{each.value}, in other words{{}}")
    stored = directory.load(tmp_path / "run")
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    named = [each for each in plan.caveats if each.fact == fact]
    assert len(named) == 1 and (reworded or named[0].line in text)
    evidence = SimpleNamespace(
        plan=plan, privacy=stored.privacy, run=stored.run, stored=stored, dataset=data,
        users=data.train, key=SecretKey.create(5) if plan.seeded else KEY,
    )  # fmt: skip
    assert str(named[0]) in _outside(evidence)
    line = {"head": {}, "chain": ""}
    released = Released.of(plan, [line], "", run_dir=tmp_path, stored=stored, checks=[])
    assert f"- {named[0]}" in card_of(released).replace("\\", "")
    if fact == Fact.CALLBACK:  # nothing in the files of a run can show it
        return
    monkeypatch.setattr(Plan, "caveats", tuple(each for each in plan.caveats if each.fact != fact))
    with pytest.raises(Violated):
        _outside(evidence)


@pytest.mark.privacy
def test_held_out_users_are_touched_for_a_price_or_not_at_all(tmp_path, monkeypatch):
    users = data_with([[7, 8]]).train
    monkeypatch.setattr(open, "load_data", lambda *_: Dataset(users, eval_users=users))
    seen = []
    for strict, priced in itertools.product((False, True), (None, 1.0)):
        run = run_config(data="x", run_dir=tmp_path, strict=strict, model="micro", log_to=())
        privacy = PrivacyConfig(8.0, 4, eval_epsilon=priced)
        with open.open_run(Algorithm.ULS, privacy, run, Console()) as opened:
            seen.append(opened.data.eval_users is not None)
    assert seen == [True, True, False, True]


def trained(texts, run_dir, capsys, algorithm, *more, **flags):
    """What a run of a few steps says; its budget ledger is a directory of the test."""
    flags = {"seed": None, "group_size": None, "strategy": "scan", "rows_per_pass": 2, **flags}
    args = train_args(texts, run_dir, budget_ledger=run_dir.parent / "budget", **flags)
    main(["train", algorithm, *map(str, args), *more])
    return capsys.readouterr().err


def outside(run_dir):
    """The check of `verify` on what is outside the guarantee."""
    checks = {check.promise: check for check in verify(run_dir, console=Console())}
    assert [name for name in checks if checks[name].holds is False and name != "outside"] == []
    return checks["outside"]


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("algorithm, more", [("els", ["--strict"]), ("uls", [])])
def test_a_run_without_a_footnote_says_so(texts, run_dir, capsys, algorithm, more):
    err = trained(texts, run_dir, capsys, algorithm, *more, epsilon=40)
    assert ALL_COVERED in err and "not covered" not in err and "not private" not in err
    assert ("held-out loss" in err) == (not more)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outside"] == [] and summary["num_examples"] > 60
    assert "num_examples" in summary["private_fields"] and summary["non_private"] == []
    assert (summary["final_eval_loss"] == "nan") == bool(more)
    assert ledger.head(run_dir)["plan"]["num_examples"] is None
    check = outside(run_dir)
    assert check.holds and check.found == ALL_COVERED
    main(["report", str(run_dir), "--out", str(run_dir.parent / "out")])
    page = (run_dir.parent / "out" / "report.md").read_text()
    assert "Whatever this run publishes that depends on a user's texts has noise" in page
    assert "eval_loss" not in page
    for what in ("examples", "texts"):
        assert f"{summary['num_examples']} {what}" not in page


def hides_a_footnote(*args, **options):
    return defaults.fill_defaults(*args, **options)[0], []


def public_size(_, privacy, __):
    return dataclasses.replace(privacy, group_size=3)


HIDDEN = [
    (prepare, "fill_defaults", hides_a_footnote, "clip_norm (chosen"),
    (prepare, "with_group_size", public_size, "group_size=3, which is neither private nor a defau"),
    (defaults, "private_median", lambda *_: 7, "group_size=7: the key draws"),
]


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("where, name, planted, says", HIDDEN)
def test_verify_looks_for_footnotes_itself(
    where, name, planted, says, texts, run_dir, capsys, monkeypatch
):
    flags = {"tuned_on_data": "clip_norm"} if name == "fill_defaults" else {}
    with monkeypatch.context() as patch:
        patch.setattr(where, name, planted)
        err = trained(texts, run_dir, capsys, "els", epsilon=40, **flags)
        assert ALL_COVERED in err
    check = outside(run_dir)
    assert check.holds is False and says in check.found
