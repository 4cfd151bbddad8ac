"""The strategy of a run: timed once, remembered, recorded, and named where it is wrong."""

import errno
import json
import math
import os
import time

import jax
import numpy as np
import pytest
from flax import linen as nn
from refused import refuses
from test_worker import ModelTask
from zoo import VOCAB, Tied

from fedsim.clipping import Clip, Strategy
from fedsim.data import Dataset, UserStore
from fedsim.engine import trials as engine_trials
from fedsim.engine.engine import Engine, Trial
from fedsim.engine.trials import choose_strategy
from fedsim.engine.worker import LocalEngine
from fedsim.models import LanguageModelTask, TransformerConfig, language_model

CLIP, UNITS = Clip(0.1), (12, 2)
SCAN, GHOST = Strategy("scan", 2), Strategy("ghost", 4)


class NamedTask(ModelTask):
    """Looks the same in every process, as tasks of runs do."""

    def __repr__(self):
        return f"NamedTask({self.model})"


class Unknown(nn.Module):
    """Has a parameter in no layer that `ghost` knows."""

    @nn.compact
    def __call__(self, batch):
        x = nn.Embed(VOCAB, VOCAB)(batch["tokens"])
        return x * self.param("gain", nn.initializers.ones, (1, 1, VOCAB))


@pytest.fixture(autouse=True)
def two_candidates(monkeypatch):
    monkeypatch.setattr(engine_trials, "candidates", lambda *_, **__: [SCAN, GHOST])
    monkeypatch.setattr(engine_trials, "LEAST_TRIALS_S", math.inf)  # however busy the machine is


def given(model=None):
    task = NamedTask(model or Tied(4))
    fresh = jax.jit(task.model.init)
    params = fresh(jax.random.key(0), task.read("train", np.arange(2)))["params"]
    return task, params


def local(model=None):
    task, params = given(model)
    return LocalEngine(task, num_lanes=2), params


@pytest.fixture
def no_trial(monkeypatch):
    def fail(*_):
        raise AssertionError("tried again")

    return lambda: monkeypatch.setattr(Engine, "try_strategies", fail)


@pytest.mark.slow
@pytest.mark.ci
def test_the_choice_is_made_once(tmp_path, no_trial):
    engine, params = local()
    strategy, why = choose_strategy(engine, params, *UNITS, CLIP, "auto", tmp_path / "c")
    assert strategy in (SCAN, GHOST)
    assert "scan:2 " in why and "; ghost:4 " in why and why.count(" MiB") == 2
    (file,) = (tmp_path / "c").iterdir()
    assert json.loads(file.read_text())["strategy"] == str(strategy)
    no_trial()
    again = choose_strategy(*local(), *UNITS, CLIP, "auto", tmp_path / "c")
    assert again == (strategy, "the fastest when this machine tried")


@pytest.mark.slow
@pytest.mark.ray
def test_engines_with_the_same_threads_make_the_same_choice(ray_cluster, tmp_path, no_trial):
    from fedsim.engine.ray_engine import RayEngine

    task, params = given()
    pool = RayEngine(task, num_lanes=2, num_workers=1, threads=1)
    first, _ = choose_strategy(pool, params, *UNITS, CLIP, "auto", tmp_path)
    pool.close()
    no_trial()
    engine = LocalEngine(task, num_lanes=2)
    again = choose_strategy(engine, params, *UNITS, CLIP, "auto", tmp_path)
    assert again == (first, "the fastest when this machine tried")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("change", ["model", "group", "threads"])
def test_another_model_group_or_machine_is_tried_anew(change, tmp_path, no_trial, monkeypatch):
    engine, params = local()
    choose_strategy(engine, params, *UNITS, CLIP, "auto", tmp_path)
    no_trial()
    units = (8, 3) if change == "group" else UNITS
    if change == "model":
        engine, params = local(Tied(6))
    if change == "threads":
        monkeypatch.setenv("NPROC", "7")
    with pytest.raises(AssertionError, match="tried again"):
        choose_strategy(engine, params, *units, CLIP, "auto", tmp_path)


DAMAGED = ("", "{}", "[]", '{"strategy": 3}', '{"strategy": "vmap:8"}')
NOT_TRIED = ('{"strategy": "direct:8"}', '{"strategy": "scan:3"}')


@pytest.mark.parametrize("text", [*DAMAGED, *NOT_TRIED])
def test_a_memory_that_is_damaged_or_of_what_is_not_tried_is_made_anew(text, tmp_path, monkeypatch):
    engine, params = local()
    trials = [Trial(SCAN, 2.0), Trial(GHOST, 1.0)]
    monkeypatch.setattr(Engine, "try_strategies", lambda *_: trials)
    choose_strategy(engine, params, *UNITS, CLIP, "auto", tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert choose_strategy(engine, params, *UNITS, CLIP, "auto", tmp_path)[0] == GHOST
    assert json.loads(file.read_text())["strategy"] == "ghost:4"


def test_a_cache_on_a_full_disk_does_not_stop_a_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Engine, "try_strategies", lambda *_: [Trial(SCAN, 2.0), Trial(GHOST, 1.0)])
    monkeypatch.setattr("fedsim.engine.trials.keep_in_cache", full)
    assert choose_strategy(*local(), *UNITS, CLIP, "auto", tmp_path)[0] == GHOST
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "seconds, fault, expected", [(1.0, None, SCAN), (0.5, None, GHOST), (0.5, "no", SCAN)]
)
def test_the_fastest_that_can_be_used_is_taken(seconds, fault, expected, tmp_path, monkeypatch):
    trials = [Trial(SCAN, 1.02), Trial(GHOST, seconds, 0, fault)]
    monkeypatch.setattr(Engine, "try_strategies", lambda *_: trials)
    assert choose_strategy(*local(), *UNITS, CLIP, "auto", tmp_path)[0] == expected


def test_a_choice_that_ended_early_is_not_that_of_a_longer_run(tmp_path, no_trial, monkeypatch):
    trials = [Trial(SCAN, 2.0), Trial(GHOST, 1.0)]
    monkeypatch.setattr(Engine, "try_strategies", lambda *_: trials)
    monkeypatch.setattr(engine_trials, "LEAST_TRIALS_S", 0.0)

    def choose(num_steps):
        asked = (*local(), *UNITS, CLIP, "auto", tmp_path)
        return choose_strategy(*asked, num_steps=num_steps)[0]

    assert choose(0) == SCAN and choose(10**5) == GHOST  # a second more is nothing to the long run
    no_trial()
    assert choose(0) == GHOST


def test_a_trial_that_would_end_too_late_is_not_begun(tmp_path, monkeypatch):
    begun = []

    def trials(*_):
        for trial in (Trial(SCAN, 2.0), Trial(GHOST, 1.0)):
            begun.append(trial)
            time.sleep(0.3)
            yield trial

    monkeypatch.setattr(Engine, "try_strategies", trials)
    monkeypatch.setattr(engine_trials, "LEAST_TRIALS_S", 0.5)
    strategy, _ = choose_strategy(*local(), *UNITS, CLIP, "auto", tmp_path)
    assert strategy == SCAN and len(begun) == 1


def test_runs_of_a_length_keep_a_choice_that_ended_early(tmp_path, no_trial, monkeypatch):
    monkeypatch.setattr(Engine, "try_strategies", lambda *_: [Trial(SCAN, 2.0), Trial(GHOST, 1.0)])
    monkeypatch.setattr(engine_trials, "LEAST_TRIALS_S", 0.0)
    first = choose_strategy(*local(), *UNITS, CLIP, "auto", tmp_path)
    no_trial()
    again = choose_strategy(*local(), *UNITS, CLIP, "auto", tmp_path)
    assert first[0] == SCAN and again == (SCAN, "the fastest when this machine tried")


def test_a_model_that_is_not_known_is_left_to_scan(tmp_path):
    strategy, why = choose_strategy(*local(Unknown()), *UNITS, CLIP, "auto", tmp_path)
    assert strategy == SCAN and "ghost:4 parameter gain: expected one of a layer" in why
    with refuses("strategy=ghost:8", says="parameter gain: "):
        choose_strategy(*local(Unknown()), *UNITS, CLIP, "ghost:8", tmp_path)


@pytest.mark.slow
@pytest.mark.ci
def test_a_strategy_that_is_asked_for_is_taken_and_not_remembered(tmp_path):
    found = choose_strategy(*local(), *UNITS, CLIP, "ghost:8", tmp_path / "c")
    assert found == (Strategy("ghost", 8), "as asked for")
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
@pytest.mark.privacy
def test_trials_read_no_text(tmp_path, monkeypatch):
    def read(self, split, rows):
        assert (rows == -1).all(), "a text was read"
        return right(self, split, np.zeros(len(rows), int))

    right = ModelTask.read
    engine, params = local()
    monkeypatch.setattr(ModelTask, "read", read)
    assert choose_strategy(engine, params, *UNITS, CLIP, "auto", tmp_path)[0] in (SCAN, GHOST)


@pytest.mark.slow
@pytest.mark.ci
def test_a_large_models_passes_are_tried_with_the_units_that_they_have(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "LARGE", 0)
    tried = [Strategy("scan", 1), Strategy("direct", 4)]
    monkeypatch.setattr(engine_trials, "candidates", lambda *_, **__: tried)
    store = UserStore.from_examples({"u": [[1, 2]]}, 128, VOCAB)
    task = LanguageModelTask(Dataset(train=store), TransformerConfig(VOCAB, 128, 8, 1, 2))
    engine, params = LocalEngine(task, num_lanes=2), task.init(jax.random.key(0))
    found, why = choose_strategy(engine, params, 8, 1, Clip(1.0), "auto", tmp_path)
    assert found in tried and why.startswith("fastest of 2 tried: scan:1 ") and "direct:4 " in why
