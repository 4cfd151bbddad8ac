"""Audits of chats whose owners speak in the context of others: below the claim, or refuted."""

import functools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from chats import model_files

from experiments.mean_task import MeanTask
from fedsim import accounting
from fedsim.clipping import Clip
from fedsim.config import Algorithm
from fedsim.data.building.build import build
from fedsim.data.tokenizer import Tokenizer
from fedsim.els import ELS
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.sampling import Sampling
from fedsim.shared_uls import SharedULS
from fedsim.trust.bounds import audit_guesses, curve_claim
from fedsim.trust.canaries import Canaries, CanaryTask, coins
from fedsim.uls import ULS

STEPS, DELTA, GROUP_SIZE = 4, 1e-5, 2
SPEAKING, CHATS_OF_EACH = 100, 8


def attacked(method, task, plant, epsilon):
    """The attack on steps with the noise that their event asks for: `GuessBound`."""
    sigma = accounting.calibrate_noise(
        method.event, epsilon=epsilon, delta=DELTA, num_steps=STEPS, before=[]
    )
    engine = LocalEngine(task, num_lanes=1)
    for step in range(STEPS):
        settings = {"clip": Clip(1.0), "noise_multiplier": sigma}
        noisy, _ = method.gradient(jnp.zeros(len(plant.included)), step, engine, **settings)
        plant.on_release(noisy.values(), 1 / method.sampler.expected_count)
    epsilons = np.linspace(0, 2 * epsilon + 1, 100)
    claim = curve_claim(
        epsilons, accounting.privacy_curve([(method.event(sigma), STEPS)], epsilons)
    )
    return audit_guesses(plant.scores(), plant.included, claim, DELTA, 5e-4)


def audited_chats(algorithm, tmp_path, context_owns, epsilon=2.0):
    """The audit of chats in which canaries speak before others' turns, which are trained on.

    A canary asks, each time somebody else. The coin decides whether its turns say anything. What a
    row does is told by the untrained tokens of the data set that was built.

    Args: context_owns: authors of context are owners, too.
    """
    rng = np.random.default_rng(0)
    plant = Canaries(coins(SPEAKING, rng), GROUP_SIZE, 1.0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"[{i}]" if there else ""},
                {"role": "assistant", "content": "Yes."},
            ],
            "people": [*[f"canary {i}"] * context_owns, f"desk {i}-{j}"],
        }
        for i, there in enumerate(plant.included)
        for j in range(CHATS_OF_EACH)
    ]
    tmp_path.mkdir(exist_ok=True)
    file, model = tmp_path / "chats.jsonl", model_files(tmp_path / "model")
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    how = {"tokenizer": model, "user_column": "people", "eval_users": 0, "eval_examples": False}
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
    found = audited_chats(Algorithm.ELS, tmp_path, True)
    assert not found.refuted and found.could_refute and found.correct > SPEAKING / 2
    for algorithm in Algorithm:
        assert audited_chats(algorithm, tmp_path / algorithm, False).refuted
