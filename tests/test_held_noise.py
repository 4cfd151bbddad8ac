"""Noise that workers add to a sum which they keep: the driver's bits, and no more keys."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from messages import found, keys_of_noise, other_secrets
from problems import two_steps

from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.engine import reduction
from fedsim.errors import ConfigError
from fedsim.mechanism import noisy_mean
from fedsim.noise import Correlated, HeldSum
from fedsim.noise.independent import BLOCK
from fedsim.training.settings import expect_trust

pytestmark = pytest.mark.privacy
SIZES = [7, 2 * BLOCK + 5, 30]


@pytest.fixture(scope="module")
def total():
    rng = np.random.default_rng(0)
    return [rng.integers(-(10**6), 10**6, size).astype(np.int32) for size in SIZES]


def held(total, num_workers, sent):
    """A sum that some workers hold, each with all of it, as after a psum."""

    def release(shares):
        sent.extend(map(pickle.dumps, shares))
        return [pickle.loads(share).released(total) for share in sent[-len(shares) :]]

    return HeldSum(total, num_workers, release)


@pytest.mark.parametrize("num_workers", [1, 2, 7])
def test_what_workers_release_are_the_bits_of_the_driver(total, key, num_workers):
    own = {"clip": Clip(0.5), "noise_multiplier": 1.5, "count": 10, "key": key, "step": 3}
    expected = noisy_mean(total, **own)
    noisy = noisy_mean(held(total, num_workers, []), **own)
    assert noisy.unit == expected.unit
    for leaf, known in zip(noisy.numbers, expected.numbers, strict=True):
        assert leaf.dtype == known.dtype and np.array_equal(leaf, known)
        assert not np.array_equal(leaf, total[0][: len(leaf)])


def test_a_worker_is_given_the_keys_of_its_share_of_a_step_and_no_others(total, key):
    sent = []
    held(total, 2, sent).noisy(stddev=2.0**30, key=key, step=3)
    of_step = keys_of_noise(key, SIZES, 3)
    first, second = (set(found(of_step, [share])) for share in sent)
    assert first and second and not first & second and first | second == set(of_step)
    others = [*keys_of_noise(key, SIZES, 2), *keys_of_noise(key, SIZES, 4), *other_secrets(key, 3)]
    assert not found(others, sent)
    streams = pickle.loads(sent[0]).keys
    with pytest.raises(KeyError):
        streams.generator("units", 3)
    assert "hidden" in repr(streams)
    with pytest.raises(TypeError, match="a key stays in its process"):
        pickle.dumps(key)


def test_correlated_noise_is_not_added_by_workers(total, key):
    own = {"clip": Clip(0.5), "noise_multiplier": 1.5, "count": 10, "key": key, "step": 0}
    with pytest.raises(ConfigError, match="expected independent, where workers add it"):
        noisy_mean(held(total, 1, []), **own, add_noise=Correlated(4, 2))


TRUST = {"trust_workers_with_noise": True}


@pytest.mark.parametrize(
    "kind, strategy, audited, message",
    [
        ("local", None, False, "expected False, or --engine spmd"),
        ("spmd", object(), False, "expected False, or --noise independent"),
        ("spmd", None, True, "expected False in an audit"),
    ],
)
def test_trust_that_nothing_comes_of_is_refused(kind, strategy, audited, message):
    plan = SimpleNamespace(strategy=strategy)
    with pytest.raises(ConfigError, match=f"trust_workers_with_noise=True: {message}"):
        expect_trust(EngineConfig(kind, **TRUST), plan, audited=audited, goes_on=False)


def test_without_noise_there_is_nothing_to_trust_workers_with():
    with pytest.raises(ConfigError, match="trust_workers_with_noise=True: expected False where"):
        reduction(EngineConfig("spmd", num_workers=2, **TRUST), exact=False)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.ci
def test_a_run_says_whom_it_trusted_has_the_same_bits_and_goes_on_elsewhere(ray_cluster, tmp_path):
    def run(name, **options):
        return two_steps(tmp_path / name, strategy="scan", **options)

    alone = run("alone", engine="local")
    trusted = run("trusted", engine="spmd", num_workers=2, **TRUST)
    assert trusted["params_sha256"] == alone["params_sha256"]
    says = "what workers hold: they add the noise"
    assert any(fact.startswith(says) for fact in trusted["non_private"])
    assert not any(fact.startswith(says) for fact in alone["non_private"])
    assert says in (tmp_path / "trusted" / "ledger.jsonl").read_text()
    with pytest.raises(ConfigError, match="trust_workers_with_noise=False: expected True"):
        run("trusted", engine="spmd", num_workers=2, resume=True)
    (tmp_path / "trusted" / "checkpoints" / "step-00000002.msgpack").unlink()
    again = run("trusted", engine="local", resume=True, **TRUST)  # the driver adds the noise
    assert again["params_sha256"] == alone["params_sha256"]
