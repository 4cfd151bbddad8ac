"""A run that goes on as something else: as an older copy of itself, or with other draws."""

import os
import signal
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from refused import refuses

import fedsim
from fedsim import keys
from fedsim.engine import environment
from fedsim.keys import SecretKey
from fedsim.noise import correlated, independent
from fedsim.plan import drawn_once
from fedsim.sampling import Allocation, Cyclic, Poisson

NUM_USERS, STEPS = 60, 8
SETTINGS = {"epsilon": 4, "delta": 1e-3, "num_steps": STEPS, "batch_size": 10, "optimizer": "sgd"}
SETTINGS |= {"learning_rate": 0.1, "engine": "local", "strategy": "scan", "checkpoint_every": 1}
CYCLIC = {"sampling": "cyclic", "bands": 3}


class Mean(fedsim.Task):
    """Squared distances from rows of eight numbers."""

    rows = np.random.default_rng(0).normal(size=(3 * NUM_USERS, 8)).astype(np.float32)

    def init(self, key):
        return {"w": np.zeros(8, np.float32)}

    def read(self, split, rows):
        return {"x": self.rows[rows]}

    def losses(self, params, batch):
        return 0.5 * jnp.sum((params["w"][None] - batch["x"]) ** 2, axis=1)


class Watch(fedsim.Callback):
    def __init__(self, look):
        self.look = look

    def on_step(self, step, metrics):
        self.look(step)


def train(run_dir, algorithm="uls", **settings):
    settings = {"data": np.arange(3 * NUM_USERS) % NUM_USERS, **SETTINGS, **settings}
    return fedsim.train(algorithm, task=Mean(), run_dir=run_dir, **settings)


def stop(step):
    if step == 4:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.privacy
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "uls", **CYCLIC},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"algorithm": "uls", "sampling": "allocation", "participations": 2},
                {"algorithm": "els", "group_size": 2},
            )
        ),
    ],
)
def test_turns_that_other_packages_draw_otherwise_are_refused_and_the_same_ones_are_not(
    settings, run_dir, monkeypatch
):
    """A user could take part in two steps of a cycle, or of a window."""
    train(run_dir, callbacks=[Watch(stop)], **settings)
    at = keys.Streams.at
    with monkeypatch.context() as patch:
        patch.setattr(keys.Streams, "at", lambda self, index: at(self, index + 1))
        with refuses("packages", says="draw the pool and users' turns"):
            train(run_dir, resume=True, **settings)
    assert train(run_dir, resume=True, **settings).finished


@pytest.mark.privacy
def test_every_draw_that_is_made_once_is_in_the_seal(key):
    """One more or less, of any window, group or place of a pool."""
    samplers = {
        "cyclic": (Cyclic(40, 5, bands=4), 1),
        "one by one": (Cyclic(40, 5, bands=4, balanced=False), 1),
        "allocation": (Allocation(40, 5, window=4), 3),
    }
    for name, (sampler, draws) in samplers.items():
        seen = list(sampler.drawn_once(key, 11))  # the last window is not whole
        assert len(seen) == (draws if name == "allocation" else 2)
        taken = [set(sampler.draw(key, step)) for step in range(11)]
        for step, units in enumerate(taken):  # a function of what is sealed, and of Poisson coins
            if name == "allocation":
                assert units == set(np.flatnonzero(seen[step // 4] == step % 4))
            else:
                order, starts = seen
                assert units <= set(order[starts[step % 4] : starts[step % 4 + 1]])
    assert not list(Poisson(40, 5).drawn_once(key, 12))
    keys = SecretKey.create(1), SecretKey.create(1)  # of one seed, which has the same groups
    methods = [type("Method", (), {"sampler": sampler, "key": each}) for each in keys]
    assert len({drawn_once(each, 8, each.key) for each in methods}) == 2


@pytest.mark.privacy
def test_the_context_of_a_run_has_whatever_draws_and_bits_depend_on(monkeypatch):
    found = environment.versions()
    assert {"numpy", "scipy", "randomgen", "cryptography", "jax"} <= found.keys()
    assert found["jax_threefry_partitionable"] in ("True", "False")
    monkeypatch.setenv("NPY_DISABLE_CPU_FEATURES", "AVX512F")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    now = environment.versions()
    assert now["NPY_DISABLE_CPU_FEATURES"] == "AVX512F"
    assert now["XLA_FLAGS"] == "--xla_cpu_max_isa=AVX2"
    assert environment.difference(found, now) == ""  # workers have variables of their own


@pytest.mark.privacy
def test_the_name_of_every_file_is_durable(run_dir, tmp_path, monkeypatch):
    """A power failure after a step was shown must not take away what says that it was released."""
    durable, fsync = set(), os.fsync

    def seen(descriptor):
        fsync(descriptor)
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if place.is_dir():
            durable.update(place / name for name in os.listdir(descriptor))

    monkeypatch.setattr(os, "fsync", seen)
    place = tmp_path / "state" / "ledger"
    shown = []

    def look(step):
        there = [*run_dir.rglob("*"), run_dir, *place.rglob("*"), place, place.parent]
        shown.append({path for path in there if not path.name.endswith(".tmp")} - durable)

    train(run_dir / "inner", callbacks=[Watch(look)], budget_ledger=place, num_steps=2)
    # No promise depends on these, and a thread may be writing them: without a checkpoint a run
    # takes its steps again, with the same bits.
    left_out = {"lock", "metrics.jsonl", "tb", "progress.json", "checkpoints"}
    for missing in shown:
        assert {path for path in missing if not left_out & set(path.parts)} == set()
    assert durable >= {run_dir / "inner" / "ledger.jsonl", place / "budget.jsonl", place / "steps"}


@pytest.mark.privacy
@pytest.mark.parametrize("settings", [{}, {"noise": "correlated", "bands": 3}])
def test_no_two_draws_of_a_run_share_their_noise(settings, run_dir, monkeypatch):
    """Of gradients, clip norms, training losses and evaluations, in any two steps."""
    real, drawn = independent.gaussian, []

    def noted(rng, out):
        drawn.append(real(rng, out)[0])
        return out

    for module in (independent, correlated):
        monkeypatch.setattr(module, "gaussian", noted)
    extras = {"loss_bound": 9.0, "clip_quantile": 0.5, "eval_epsilon": 1.0, "eval_loss_bound": 9.0}
    data = {"train": np.arange(3 * NUM_USERS) % 50, "eval_users": 50 + np.arange(10) % 5}
    assert train(run_dir, data=data, eval_every=1, **settings, **extras).finished
    assert len(drawn) == STEPS * 4 + 1 and len(set(drawn)) == len(drawn)
