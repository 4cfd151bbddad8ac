"""The run without a footnote: before its first noisy number, no byte depends on a user's texts."""

import dataclasses
import json

import pytest
from learnt import learnt
from refused import refuses
from test_cli import texts, train_args  # noqa: F401

from fedsim.cli.main import main
from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.data import Dataset, UserStore
from fedsim.keys import SecretKey
from fedsim.plan import NOTHING, defaults, ledger_head, planner
from fedsim.run import Console
from fedsim.sampling import median_group_size, rank_error
from fedsim.training import Callback, launch, open, planned, strict
from fedsim.training.launch import launch as begin
from fedsim.training.planned import plan_run
from fedsim.trust.verify import verify

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
    return Dataset(UserStore.from_examples({**users, "v": rows}, LENGTH, VOCAB))


def published(algorithm, data, place, monkeypatch, capfd, *, callbacks=(), **flags):
    """What a run with this data writes and shows before its first step, without its times."""
    real = SecretKey.create
    monkeypatch.setattr(open, "load_data", lambda *_: data)
    monkeypatch.setattr(
        open.SecretKey, "create", lambda seed=None, *_: KEY if seed is None else real(seed)
    )
    run_names = {"strict", "seed", "log_to", "log_non_private", "tokenizer"}
    run_names |= {"strategy", "rows_per_pass"}
    of_run = {name: flags.pop(name) for name in run_names & flags.keys()}
    run = run_config(
        data="made up", run_dir=place / "run", model="micro", engine="local",
        **{"strategy": "scan", "rows_per_pass": 1, **of_run, "log_to": of_run.get("log_to", ())},
        budget_ledger=place / "budget",
    )  # fmt: skip
    privacy = PrivacyConfig(**{"epsilon": 8.0, "num_steps": 4, "batch_size": 8, **flags})
    capfd.readouterr()
    with open.open_run(algorithm, privacy, run, Console()) as opened:
        plan = plan_run(opened, callbacks=callbacks)
        begin(opened, plan)
    shown = capfd.readouterr().err
    config = json.loads((run.run_dir / "config.json").read_text())
    # Seals are keyed: whoever has not the key cannot tell them from random bits.
    plan, sealed = plan.plan, [plan.plan.data_seal, plan.plan.drawn_once]
    assert plan.data_seal == KEY.seal(data.train.fingerprint)
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


CELLS = [
    (algorithm, sampling)
    for algorithm in Algorithm
    for sampling in ("poisson", "cyclic", "allocation")
    if (algorithm, sampling) != (Algorithm.ELS, "allocation")
]


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("algorithm, sampling", CELLS)
def test_a_user_changes_no_byte_before_the_first_noise(algorithm, sampling, pair):
    flags = {"group_size": 2, "sampling": sampling, "bands": 2 if sampling == "cyclic" else None}
    one, other, plan = pair(algorithm, PLANTED["many texts"], **flags)
    assert one == other and NOTHING in one and plan.outside == NOTHING


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize(
    "rows",
    [
        *(pytest.param(rows, id=name) for name, rows in PLANTED.items()),
        pytest.param([[3] * LENGTH] * 2_100_000, id="100 MB", marks=pytest.mark.slow),
    ],
)
def test_neither_do_other_texts_with_strict(rows, pair):
    one, other, plan = pair(Algorithm.ULS, rows, strict=True)
    assert one == other and NOTHING in one and not plan.uncovered


@pytest.mark.privacy
def test_els_draws_its_group_size_privately_by_default(pair, monkeypatch):
    monkeypatch.setattr(defaults, "private_median", lambda *_: 3)  # the first noisy number
    monkeypatch.setattr(defaults, "MOST_SHARE", 0.2)  # few users
    one, other, plan = pair(Algorithm.ELS, PLANTED["many texts"], strict=True)
    assert one == other and plan.group_size == 3 and not plan.uncovered
    assert plan.group_size_epsilon == rank_error(1.0) / (defaults.MISS * NUM_USERS)


@pytest.mark.privacy
def test_of_too_few_users_els_takes_a_public_group_size(pair):
    one, other, plan = pair(Algorithm.ELS, PLANTED["many texts"], batch_size=50)
    assert one == other and plan.group_size == 2 and plan.group_size_epsilon is None


@pytest.mark.privacy
@pytest.mark.parametrize(
    "says, flags",
    [
        ("eval_epsilon", {"eval_epsilon": 1.0}),
        ("epsilon", {"epsilon": 300.0}),
        ("strategy", {"strategy": "direct", "rows_per_pass": 999999}),
    ],
)
def test_a_mistake_is_found_before_the_draw_of_a_group_size_is_paid(
    says, flags, tmp_path, monkeypatch, capfd
):
    flags = {"group_size_epsilon": 0.5, **flags}
    with refuses(says):
        published("els", data_with([[7, 8]]), tmp_path, monkeypatch, capfd, **flags)
    assert not (tmp_path / "budget").exists() and not (tmp_path / "run").exists()


@pytest.mark.privacy
def test_who_has_enough_texts_is_a_footnote_with_which_a_run_is_verified(tmp_path, monkeypatch):
    rules = {"rules": {"min_examples": 3}}
    data = dataclasses.replace(data_with([[7, 8]]), metadata=rules)
    _, facts = defaults.complete(Algorithm.ULS, PrivacyConfig(8.0, 4, batch_size=8), data)
    assert "public by assumption: who has at least 3 texts (min_examples)" in facts
    data = dataclasses.replace(data, metadata={"settings": {"skip_unknown": True}})
    _, facts = defaults.complete(Algorithm.ULS, PrivacyConfig(8.0, 4, batch_size=8), data)
    assert "public by assumption: who has a row that was not left out (skip_unknown)" in facts


def count_of_texts(privacy, users):
    return users.num_examples


def unkeyed_median(sizes, epsilon, rng):
    return median_group_size(sizes) + int(sizes.max() > 100)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "where, name, planted",
    [
        (planner, "public_examples", count_of_texts),
        (defaults, "private_median", unkeyed_median),
        (defaults, "_public_counts", lambda a, p, users: [f"{users.num_examples} examples"]),
    ],
)
def test_a_footnote_that_is_put_back_is_noticed(where, name, planted, pair, monkeypatch):
    monkeypatch.setattr(where, name, planted)
    monkeypatch.setattr(defaults, "MOST_SHARE", 0.2)
    one, other, _ = pair(Algorithm.ELS, PLANTED["many texts"])
    assert one != other


class Reader(Callback):
    reads_non_private = True


@pytest.mark.privacy
@pytest.mark.parametrize(
    "says, flags",
    [
        ("epsilon=inf", {"epsilon": float("inf")}),
        ("adjacency=add-or-remove", {"adjacency": "add-or-remove"}),
        ("chosen_on_data=clip_norm", {"chosen_on_data": "clip_norm"}),
        ("seed=5", {"seed": 5}),
        ("log_non_private=True", {"log_to": ["mlflow"], "log_non_private": True}),
        ("callbacks=Reader", {"callbacks": [Reader()]}),
        ("tokenizer=None", {}),
        ("data=made up with min_examples=2", {}),
        ("data=made up with skip_unknown", {}),
    ],
)
def test_strict_refuses_what_needs_a_footnote(says, flags, tmp_path, monkeypatch, capfd):
    data = data_with([[7, 8]])
    if not flags:
        tokenizer = {"tokenizer": {"public": False}}
        rules = {"rules": {"min_examples": 2}}
        about = {"tokenizer": tokenizer, "min_examples": rules}
        about["skip_unknown"] = {"settings": {"skip_unknown": True}}
        data.metadata.update(next(each for name, each in about.items() if name in says))
    with refuses(says, says="with strict"):
        published("uls", data, tmp_path, monkeypatch, capfd, strict=True, **flags)
    assert not (tmp_path / "run").exists() and not (tmp_path / "budget").exists()


@pytest.mark.privacy
def test_held_out_users_are_touched_for_a_price_or_not_at_all(tmp_path, monkeypatch, capfd):
    seen = []

    def opening(*args, held_out, **_):
        seen.append(held_out)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "open_run", opening)
    run = run_config(data="x", run_dir=tmp_path, strict=True, log_to=())
    for priced in ({}, {"eval_epsilon": 1.0}):
        privacy = PrivacyConfig(8.0, 4, **priced)
        for settings in (run, dataclasses.replace(run, strict=False)):
            with pytest.raises(KeyboardInterrupt):
                launch.train(Algorithm.ULS, privacy, settings, Console())
    assert seen == [False, True, True, True]


def test_no_plan_with_a_footnote_is_strict(pair):
    *_, plan = pair(Algorithm.ULS, [])
    strict.expect_nothing_outside(plan)
    with refuses("strict=True", says="and the plan has: a fact"):
        strict.expect_nothing_outside(dataclasses.replace(plan, non_private=("a fact",)))


def trained(texts, run_dir, capsys, algorithm, *more, **flags):  # noqa: F811
    """What a run of a few steps says; its budget ledger is a directory of the test."""
    ledger = run_dir.parent / "budget"
    flags = {"seed": None, "group_size": None, "strategy": "scan", "rows_per_pass": 2, **flags}
    args = train_args(texts, run_dir, budget_ledger=ledger, **flags)
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
def test_a_run_without_a_footnote_says_so(texts, run_dir, capsys, algorithm, more):  # noqa: F811
    err = trained(texts, run_dir, capsys, algorithm, *more, epsilon=40)
    assert NOTHING in err and "not covered" not in err and "not private" not in err
    assert ("held-out loss" in err) == (not more)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outside"] == NOTHING and summary["num_examples"] > 60
    assert "num_examples" in summary["private_fields"] and summary["non_private"] == []
    assert (summary["final_eval_loss"] == "nan") == bool(more)
    head = json.loads((run_dir / "ledger.jsonl").read_text().splitlines()[0])["head"]
    assert head["outside"] == NOTHING and "num_examples" not in head["plan"]
    check = outside(run_dir)
    assert check.holds and check.found == NOTHING
    main(["report", str(run_dir), "--out", str(run_dir.parent / "out")])
    page = (run_dir.parent / "out" / "report.md").read_text()
    assert "nothing outside the guarantee" in page and "eval_loss" not in page
    assert f"{summary['num_examples']} examples" not in page
    assert f"{summary['num_examples']} texts" not in page


def hides_a_footnote(*args, **options):
    completed, _ = defaults.complete(*args, **options)
    return completed, []


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize(
    "name, planted, flags, says",
    [
        ("complete", hides_a_footnote, {"chosen_on_data": "clip_norm"}, "chosen_on_data=clip_norm"),
        ("complete", hides_a_footnote, {"tokenizer": "learnt.json"}, "learnt.json"),
        ("with_group_size", lambda _, privacy, __: dataclasses.replace(privacy, group_size=3), {},
         "group_size=3, which is neither private nor a default"),
    ],
)  # fmt: skip
def test_verify_looks_for_footnotes_itself(
    name,
    planted,
    flags,
    says,
    texts,  # noqa: F811
    run_dir,
    capsys,
    monkeypatch,
):
    if "tokenizer" in flags:
        flags = {"tokenizer": learnt("bpe", ["some words"], 300, run_dir.parent / "learnt.json")}
    with monkeypatch.context() as patch:
        patch.setattr(planned, name, planted)
        assert NOTHING in trained(texts, run_dir, capsys, "els", epsilon=40, **flags)
    check = outside(run_dir)
    assert check.holds is False and says in check.found


@pytest.mark.slow
@pytest.mark.privacy
def test_verify_draws_the_private_median_again(texts, run_dir, capsys, monkeypatch):  # noqa: F811
    with monkeypatch.context() as patch:
        patch.setattr(defaults, "private_median", lambda *_: 7)
        trained(texts, run_dir, capsys, "els", epsilon=40)
    check = outside(run_dir)
    assert check.holds is False and "group_size=7: the key draws" in check.found
