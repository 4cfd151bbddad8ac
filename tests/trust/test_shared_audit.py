"""Audits of texts with several owners: below the claim, and above it where a bound is not kept."""

import dataclasses
import functools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from chats import model_files
from test_audit import run
from test_shared_runs import chat, command  # noqa: F401 (a fixture)

from experiments.harness.mean_task import MeanTask
from experiments.mistakes.chats import without_context
from fedsim import accounting
from fedsim.clipping import Clip
from fedsim.config import Algorithm
from fedsim.data.building.build import build
from fedsim.data.building.speakers import spoken
from fedsim.data.dataset import Dataset
from fedsim.data.tokenizer import Tokenizer
from fedsim.data.users import UserStore
from fedsim.els import ELS
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.sampling import Sampling, contributions
from fedsim.shared_uls import SharedULS
from fedsim.trust.bounds import audit_curve, curve_claim
from fedsim.trust.canaries import (
    CanaryTask,
    Planted,
    PlantedAmongOthers,
    coins,
    partners_of,
    rows_of_users,
)
from fedsim.uls import ULS

CANARIES, STEPS, DELTA, GROUP_SIZE = 250, 4, 1e-5, 2


def audited(algorithm, epsilon, *, max_changed=1, trial=0):
    """The audit of mean estimation with the noise that its events ask for: `CurveBound`."""
    rng = np.random.default_rng(trial)
    els = algorithm == Algorithm.ELS
    plant = PlantedAmongOthers(
        CANARIES,
        0,
        GROUP_SIZE,
        1.0,
        coins(CANARIES, rng),
        rng,
        partners=partners_of(algorithm, max_changed),
        opposed=not els,
    )
    real = UserStore.from_examples({("a", "b"): [[1]] * 3, "b": [[2]]}, 40, 64)
    users = plant.data(Dataset(real)).train
    task = MeanTask(np.zeros((users.num_examples + 1, CANARIES)))
    task = CanaryTask(task, plant.owners, plant.directions, 1.0, plant.pulls)
    options = {"group_size": GROUP_SIZE, "sampling": Sampling(), "key": SecretKey.create(trial)}
    if els:
        budget = round(0.9 * CANARIES * GROUP_SIZE)
        method = ELS(users, batch_size=budget, **options)
    else:
        budget = round(0.9 * CANARIES * (1 + partners_of(algorithm, max_changed))) * GROUP_SIZE
        method = SharedULS(users, batch_size=budget, max_changed=max_changed, **options)
    return attacked(method, task, plant, epsilon)


def attacked(method, task, plant, epsilon):
    """The attack on steps with the noise that their event asks for: `CurveBound`."""
    sigma = accounting.calibrate_noise(
        method.event, epsilon=epsilon, delta=DELTA, num_steps=STEPS, before=[]
    )
    engine = LocalEngine(task, num_lanes=1)
    for step in range(STEPS):
        settings = {"clip": Clip(1.0), "noise_multiplier": sigma}
        noisy, _ = method.gradient(jnp.zeros(len(plant.included)), step, engine, **settings)
        plant.watch(noisy.values(), 1 / method.sampler.expected_count)
    epsilons = np.linspace(0, 2 * epsilon + 1, 100)
    claim = curve_claim(
        epsilons, accounting.privacy_curve([(method.event(sigma), STEPS)], epsilons)
    )
    return audit_curve(plant.gradient_scores(), plant.included, claim, DELTA, 0.95)


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_the_bound_is_below_the_claim(algorithm):
    found = audited(algorithm, 4.0)
    assert not found.refuted and found.could_refute
    assert 0 < found.epsilon <= 4  # the attack is not asleep


@pytest.mark.privacy
def test_a_pool_that_is_bounded_by_sets_of_owners_is_refuted(monkeypatch):
    """As if each set of owners were a user: a canary has its share of the pool once alone and once
    with every partner."""

    def by_sets(offsets, owners, group_size, key):
        return contributions.limit_contributions(offsets, group_size, key)

    monkeypatch.setattr(contributions, "bounded_pool", by_sets)
    assert audited(Algorithm.ELS, 2.0).refuted


@pytest.mark.privacy
def test_groups_of_others_that_are_not_accounted_for_are_refuted(monkeypatch):
    monkeypatch.setattr(SharedULS, "event", ULS.event)
    assert audited(Algorithm.ULS, 2.0, max_changed=2).refuted


@pytest.mark.privacy
def test_a_bound_on_groups_of_others_that_is_not_kept_is_refuted(monkeypatch):
    grouped = contributions.owners_groups

    def without_bound(offsets, owners, max_changed, key):
        return dataclasses.replace(grouped(offsets, owners, 10**6, key), max_changed=max_changed)

    monkeypatch.setattr(contributions, "owners_groups", without_bound)
    assert audited(Algorithm.ULS, 2.0, max_changed=0).refuted


# ---- Canaries in a context ------------------------------------------------------------------

SPEAKING, CHATS_OF_EACH = 100, 8


def audited_chats(algorithm, tmp_path, epsilon=2.0):
    """The audit of chats in which canaries speak before others' turns, which are trained on.

    A canary asks, each time somebody else. The coin decides whether its turns say anything. What a
    row does is told by the untrained tokens of the data set that was built.
    """
    rng = np.random.default_rng(0)
    plant = Planted(SPEAKING, 0, GROUP_SIZE, 1.0, coins(SPEAKING, rng), rng)
    rows = [
        [
            {"role": "user", "name": f"canary {i}", "content": f"[{i}]" if there else ""},
            {"role": "assistant", "name": f"desk {i}-{j}", "content": "Yes."},
        ]
        for i, there in enumerate(plant.included)
        for j in range(CHATS_OF_EACH)
    ]
    file, model = tmp_path / "chats.jsonl", model_files(tmp_path / "model")
    file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows))
    how = {"tokenizer": model, "owner_key": "name", "eval_users": 0, "eval_examples": False}
    users = build(file, tmp_path / "out", **how).train
    tokens, sizes = users.gather(np.arange(len(rows)), users.max_length)
    context = ~users.trained(np.arange(len(rows)), users.max_length)
    decode = Tokenizer.load(model / "tokenizer.json").decode
    said = [decode(ids[:n][own[:n]]) for ids, n, own in zip(tokens, sizes, context, strict=True)]
    found = [re.search(r"\[(\d+)\]", text) for text in said]
    canaries = np.array([int(each[1]) if each else -1 for each in found], np.int32)
    assert (canaries >= 0).sum() == CHATS_OF_EACH * plant.included.sum()
    task = MeanTask(np.zeros((len(rows) + 1, SPEAKING)))
    task = CanaryTask(task, canaries, plant.directions, 1.0)
    options = {"group_size": GROUP_SIZE, "sampling": Sampling(), "key": SecretKey.create(1)}
    els, of_a_unit = algorithm == Algorithm.ELS, 1 if algorithm == Algorithm.ELS else GROUP_SIZE
    shared = functools.partial(SharedULS, max_changed=1)
    kind = ELS if els else shared if users.owners is not None else ULS
    units = kind(users, batch_size=of_a_unit, **options).sampler.num_units
    batch_size = round(0.9 * units) * of_a_unit
    return attacked(kind(users, batch_size=batch_size, **options), task, plant, epsilon)


@pytest.mark.privacy
def test_canaries_in_the_context_of_others_are_below_the_claim(tmp_path):
    found = audited_chats(Algorithm.ELS, tmp_path)
    assert not found.refuted and found.could_refute and found.epsilon > 0


@pytest.mark.privacy
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_build_that_leaves_the_author_of_context_out_is_refuted(algorithm, tmp_path, monkeypatch):
    wrong = functools.partial(without_context, spoken)
    monkeypatch.setattr("fedsim.data.building.columns.spoken", wrong)
    assert audited_chats(algorithm, tmp_path).refuted


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["els", pytest.param("uls", marks=pytest.mark.ci)])
def test_a_training_command_is_audited(algorithm, chat, run_dir, capsys):  # noqa: F811
    flags = {"group_size": 2, "gradient_canaries": 40, "text_canaries": 5, "attacked_users": 8}
    _, *arguments = command(algorithm, chat, run_dir, **flags)
    code, found = run(["audit", *arguments], capsys)
    assert code == 0 and found["holds"] is not False
    assert found["planted"] == {"gradient": 40, "text": 5}
    summary = json.loads((run_dir / "summary.json").read_text())
    partners = partners_of(Algorithm(algorithm), 1)
    assert summary["num_users"] == 30 + 45 * (1 + partners)
    assert summary["shared"]["kept"] > 45
    assert "made-up partners" in (run_dir / "audit.md").read_text()
    code, checked = run(["verify", run_dir], capsys)  # what it made up is not kept
    verdicts = {each["promise"]: each["holds"] for each in checked["checks"]}
    unseen = ("data", "outside", "owners", "draws")
    assert code == 0 and all(verdicts[promise] is None for promise in unseen)
    assert all(holds for promise, holds in verdicts.items() if promise not in unseen)


def test_users_who_are_trained_on_are_not_among_those_held_out():
    train = UserStore.from_examples({("a", "b"): [[1], [2]], "b": [[3]]}, 4, 9)
    held = UserStore.from_examples({("b", "c"): [[4]], "c": [[5], [6]], "d": [[7]]}, 4, 9)
    data = Dataset(train, eval_users=held)
    assert [rows.tolist() for rows in rows_of_users(data, "eval_users", 9, 9)] == [[0, 1, 2], [3]]
    assert [rows.tolist() for rows in rows_of_users(data, "train", 9, 2)] == [[0, 1], [0, 1]]
