"""Pre-training: every example once in a pass, a cosine, and a model that fedsim starts from."""

import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from pretrained_models import command, make_texts

from experiments import pretraining
from experiments.pretraining import Batches, Settings, pretrain, schedule
from fedsim.config import run_config
from fedsim.keys import SecretKey
from fedsim.models import weights
from fedsim.run import Console


def test_every_example_comes_once_in_a_pass_and_like_lengths_come_together(key):
    lengths = np.random.default_rng(0).integers(2, 40, 103)
    batches = Batches(lengths, 20, 4, key)
    drawn = [batches.draw(step) for step in range(10)]
    for first in (drawn[:5], drawn[5:]):
        assert len(np.unique(first)) == 100 and {rows.shape for rows in first} == {(5, 4)}
    assert set(drawn[0].ravel()) != set(drawn[5].ravel())
    for rows in drawn:
        assert (np.diff(lengths[rows.ravel()]) >= 0).all()
    again = Batches(lengths, 20, 4, SecretKey.create(seed=7))
    np.testing.assert_array_equal(again.draw(7), drawn[7])


def test_the_learning_rate_rises_and_falls_like_a_cosine():
    rate = schedule(Settings(num_steps=100, batch_size=16, warmup_steps=10), 0.2)
    assert [float(rate(step)) for step in (0, 5, 10)] == pytest.approx([0, 0.1, 0.2])
    assert float(rate(55)) == pytest.approx(0.1) and float(rate(100)) == pytest.approx(0)


@pytest.mark.slow
def test_a_stopped_pretraining_goes_on_to_the_same_model_which_is_fine_tuned(tmp_path, monkeypatch):
    texts = make_texts(tmp_path)

    def run(name):
        where = {"data": str(texts), "run_dir": tmp_path / name, "max_length": 32, "seed": 0}
        how = {"model": "micro", "engine": "local", "optimizer": "adafactor", "learning_rate": 0.1}
        return pretrain(Settings(12, 16, 4), run_config(**where, **how), Console())

    assert run("whole")

    @contextmanager
    def stopped():
        yield stop

    stop = threading.Event()
    draw = Batches.draw

    def fifth(batches, step):
        if step == 4:
            stop.set()
        return draw(batches, step)

    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "stop_signals", stopped)
        patch.setattr(Batches, "draw", fifth)
        assert not run("stopped")
    assert not weights.is_directory(tmp_path / "stopped")
    assert run("stopped")
    found = [tmp_path / name / "model.safetensors" for name in ("whole", "stopped")]
    assert found[0].read_bytes() == found[1].read_bytes()
    losses = json.loads((tmp_path / "whole" / "pretraining.json").read_text())
    assert losses["loss"] < 0.9 * losses["loss_before"]
    tuned = command("train", "uls", run_dir=tmp_path / "run", model=tmp_path / "whole", data=texts)
    assert tuned["initial_eval_loss"] == pytest.approx(losses["loss"], rel=1e-5)
