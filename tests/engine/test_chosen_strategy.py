"""The strategy of a run: by rule or as asked for, checked on made-up rows, the same each time."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from refused import refuses
from test_worker import ModelTask
from zoo import VOCAB, Tied

from fedsim.clipping import Clip, Strategy, strategy
from fedsim.config import EngineConfig
from fedsim.engine.engine import Engine
from fedsim.engine.factory import choose_strategy
from fedsim.engine.worker import LocalEngine

CLIP = Clip(0.1)
AUTO = EngineConfig()


class Unknown(nn.Module):
    """Has a parameter in no layer that `ghost` knows."""

    @nn.compact
    def __call__(self, batch):
        x = nn.Embed(VOCAB, VOCAB)(batch["tokens"])
        return x * self.param("gain", nn.initializers.ones, (1, 1, VOCAB))


class Frozen(ModelTask):
    """Has a model beneath the parameters that are trained."""

    @property
    def frozen(self):
        return np.ones(1, np.float32)


def local(model=None, kind=ModelTask):
    task = kind(model or Tied(4))
    fresh = jax.jit(task.model.init)
    params = fresh(jax.random.key(0), task.read("train", np.arange(2)))["params"]
    return LocalEngine(task, num_lanes=2), params


@pytest.fixture
def large(monkeypatch):
    """Every model is large."""
    monkeypatch.setattr(strategy, "MANY_PARAMETERS", 1)


@pytest.fixture
def no_check(monkeypatch):
    monkeypatch.setattr(Engine, "ghost_fault", None)


def test_direct_is_taken_without_a_check(no_check):
    for group in (1, 3):
        assert choose_strategy(*local(), group, CLIP, AUTO) == (Strategy("direct", 4), "by rule")


def test_a_large_model_takes_ghost_for_examples_if_all_of_it_is_trained(large, monkeypatch):
    tried = []
    monkeypatch.setattr(Engine, "ghost_fault", lambda *a: tried.append(a[-1]) or "")
    assert choose_strategy(*local(), 1, CLIP, AUTO) == (Strategy("ghost", 4), "by rule")
    assert tried == [Strategy("ghost", 4)]
    assert choose_strategy(*local(), 2, CLIP, AUTO)[0] == Strategy("direct", 4)
    assert choose_strategy(*local(kind=Frozen), 1, CLIP, AUTO)[0] == Strategy("direct", 4)
    monkeypatch.setattr(LocalEngine, "facts", lambda *_: {"platform": "gpu"})
    assert choose_strategy(*local(), 1, CLIP, AUTO)[0] == Strategy("direct", 1)


def test_a_model_that_ghost_does_not_support_is_left_to_direct(large):
    found, why = choose_strategy(*local(Unknown()), 1, CLIP, AUTO)
    assert found == Strategy("direct", 4)
    assert why.startswith("by rule, as ghost:4 does not support the model: parameter gain: ")
    with refuses("strategy=ghost", says="ghost:4 parameter gain: expected to be used by"):
        choose_strategy(*local(Unknown()), 1, CLIP, EngineConfig(strategy="ghost"))


def test_rows_are_those_that_are_asked_for(no_check):
    asked = EngineConfig(strategy="scan", rows_per_pass=7)
    assert choose_strategy(*local(), 1, CLIP, asked) == (Strategy("scan", 7), "as asked for")
    found, _ = choose_strategy(*local(), 1, CLIP, EngineConfig(rows_per_pass=2))
    assert found == Strategy("direct", 2)


@pytest.mark.slow
@pytest.mark.ci
def test_ghost_is_compared_with_scan_before_it_is_taken():
    engine, params = local()
    asked = EngineConfig(strategy="ghost", rows_per_pass=8)
    assert choose_strategy(engine, params, 1, CLIP, asked)[0] == Strategy("ghost", 8)
    names = {key[-1].name for key in engine._worker.programs.compiled}
    assert names == {"ghost", "scan"}


@pytest.mark.slow
@pytest.mark.privacy
def test_the_check_of_ghost_reads_no_text(monkeypatch):
    def read(self, split, rows):
        assert (rows == -1).all(), "a text was read"
        return right(self, split, np.zeros(len(rows), int))

    right = ModelTask.read
    engine, params = local()
    monkeypatch.setattr(ModelTask, "read", read)
    asked = EngineConfig(strategy="ghost")
    assert choose_strategy(engine, params, 1, CLIP, asked)[0] == Strategy("ghost", 4)
