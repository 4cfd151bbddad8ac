"""The run without a footnote: before its first noisy number, no byte depends on a user's texts."""

import dataclasses
import json

import pytest
from refused import refuses

from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.data import Dataset, UserStore
from fedsim.keys import SecretKey
from fedsim.plan import NOTHING, defaults, ledger_head, planner
from fedsim.run import Console
from fedsim.sampling import median_group_size, rank_error
from fedsim.training import Callback, launch, open, strict
from fedsim.training.launch import launch as begin
from fedsim.training.planned import plan_run

KEY = SecretKey(b"\1" * 32, None, b"\2" * 32)
LENGTH, VOCAB, NUM_USERS = 24, 259, 40
PLANTED = {
    "other texts": [[9] * 20] * 3,
    "long texts": [[3] * LENGTH] * 3,
    "many texts": [[5, 6]] * 4000,
    "no texts": [],
}


def data_with(texts):
    """Users of 1 to 5 texts, and one with these."""
    users = {f"u{n}": [[1, 2, 3]] * (1 + n % 5) for n in range(NUM_USERS - 1)}
    return Dataset(UserStore.from_examples({**users, "v": texts}, LENGTH, VOCAB))


def published(algorithm, data, place, monkeypatch, capfd, *, callbacks=(), **flags):
    """What a run with this data writes and shows before its first step, without its times."""
    real = SecretKey.create
    monkeypatch.setattr(open, "load_data", lambda *_: data)
    monkeypatch.setattr(
        open.SecretKey, "create", lambda seed=None, *_: KEY if seed is None else real(seed)
    )
    run_names = {"strict", "seed", "log_to", "log_non_private", "tokenizer"}
    of_run = {name: flags.pop(name) for name in run_names & flags.keys()}
    run = run_config(
        data="made up", run_dir=place / "run", model="micro", engine="local", strategy="scan:1",
        budget_ledger=place / "budget", log_to=of_run.pop("log_to", ()), **of_run,
    )  # fmt: skip
    privacy = PrivacyConfig(**{"epsilon": 8.0, "num_steps": 4, "batch_size": 8, **flags})
    capfd.readouterr()
    with open.open_run(algorithm, privacy, run, Console()) as opened:
        planned = plan_run(opened, callbacks=callbacks)
        begin(opened, planned)
    shown = capfd.readouterr().err
    config = json.loads((run.run_dir / "config.json").read_text())
    # Seals are keyed: whoever has not the key cannot tell them from random bits.
    assert planned.plan.data_seal == KEY.seal(data.train.fingerprint)
    plan = dataclasses.replace(planned.plan, data_seal="", drawn_once="")
    head = ledger_head(plan, config_sha256="", key_seal="")
    text = json.dumps([head, config, shown])
    for sealed in filter(None, (planned.plan.data_seal, planned.plan.drawn_once, str(place))):
        text = text.replace(sealed, "")
    return text, plan


@pytest.fixture
def pair(tmp_path, monkeypatch, capfd):
    """What two runs publish whose data differ in one user, and the plan of the first."""

    def compare(algorithm, texts, **flags):
        told = (monkeypatch, capfd)
        one, plan = published(algorithm, data_with([[7, 8]]), tmp_path / "a", *told, **flags)
        other, _ = published(algorithm, data_with(texts), tmp_path / "b", *told, **flags)
        return one, other, plan

    return compare


CELLS = [
    (algorithm, sampling)
    for algorithm in Algorithm
    for sampling in ("poisson", "cyclic", "allocation", "shuffle")
    if (algorithm, sampling) != (Algorithm.ELS, "allocation")
]


@pytest.mark.privacy
@pytest.mark.parametrize("algorithm, sampling", CELLS)
def test_a_user_changes_no_byte_before_the_first_noise(algorithm, sampling, pair):
    flags = {"group_size": 2, "sampling": sampling, "bands": 2 if sampling == "cyclic" else None}
    one, other, plan = pair(algorithm, PLANTED["many texts"], **flags)
    assert one == other and (NOTHING in one) == (sampling != "shuffle")
    assert plan.outside == (NOTHING if sampling != "shuffle" else "epsilon: shuffled draws")


@pytest.mark.privacy
@pytest.mark.parametrize("texts", PLANTED.values(), ids=PLANTED)
def test_neither_do_other_texts_with_strict(texts, pair):
    one, other, plan = pair(Algorithm.ULS, texts, strict=True)
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
        ("sampling=shuffle", {"sampling": "shuffle"}),
        ("assumed_population=400", {"assumed_population": 400}),
        ("chosen_on_data=clip_norm", {"chosen_on_data": "clip_norm"}),
        ("seed=5", {"seed": 5}),
        ("log_non_private=True", {"log_to": ["mlflow"], "log_non_private": True}),
        ("callbacks=Reader", {"callbacks": [Reader()]}),
        ("tokenizer=None", {}),
        ("data=made up with min_examples=2", {}),
    ],
)
def test_strict_refuses_what_needs_a_footnote(says, flags, tmp_path, monkeypatch, capfd):
    data = data_with([[7, 8]])
    if not flags:
        about = {"tokenizer": {"trained_on_data": True}, "rules": {"min_examples": 2}}
        which = "tokenizer" if says.startswith("tokenizer") else "rules"
        data.metadata[which] = about[which]
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
