"""Pre-training: the mean gradient of a batch, every example once in a pass, killed and resumed."""

import json
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from pretrained_models import command, make_texts

from fedsim.cli.main import main
from fedsim.clipping import Strategy
from fedsim.config import PretrainConfig
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig
from fedsim.training.pretrain import NO_CLIP, Batches, schedule

FLAGS = {"batch_size": 16, "rows_per_pass": 4, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("pretrain"))


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


@pytest.mark.slow
@pytest.mark.ci
def test_the_sum_is_the_mean_gradient_of_the_batch(rng):
    users = {"a": [rng.integers(11, size=n) for n in (9, 4, 12, 7, 12, 5, 3, 8)]}
    store = UserStore.from_examples(users, max_length=12, vocab_size=11)
    task = LanguageModelTask(Dataset(train=store), TransformerConfig(11, 12, 8, 1, 2))
    engine = LocalEngine(task, num_lanes=2)
    params = jax.jit(task.init)(jax.random.key(0))
    total, stats = engine.clipped_sum(
        params, np.arange(8).reshape(4, 2), NO_CLIP, Strategy("scan", 2)
    )
    assert not stats.dropped.any()
    batch = task.read("train", np.arange(8))
    expected = jax.jit(jax.grad(lambda p: task.losses(p, batch).mean()))(params)
    for a, b in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a / 4, b, rtol=1e-4, atol=1e-7)


def test_the_learning_rate_rises_and_falls_like_a_cosine():
    rate = schedule(PretrainConfig(num_steps=100, batch_size=16, warmup_steps=10), 0.2)
    assert [float(rate(step)) for step in (0, 5, 10)] == pytest.approx([0, 0.1, 0.2])
    assert float(rate(55)) == pytest.approx(0.1) and float(rate(100)) == pytest.approx(0)
    assert float(schedule(PretrainConfig(num_steps=4, batch_size=16), 0.2)(0)) == pytest.approx(0.2)


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    return run_dir, command(
        "pretrain", run_dir=run_dir, data=texts, num_steps=12, model="tiny", **FLAGS
    )


def test_it_learns_and_says_that_nobody_is_protected(undisturbed):
    run_dir, summary = undisturbed
    assert summary["final_eval_loss"] < 0.9 * summary["initial_eval_loss"]
    assert summary["epsilon"] == "inf" and summary["privacy"].startswith("non-private")
    assert not (run_dir / "ledger.jsonl").exists() and list((run_dir / "tb").iterdir())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum("non_private/loss" in line for line in lines) == 12
    assert not any("privacy/epsilon" in line for line in lines)


@pytest.mark.slow
@pytest.mark.ci
def test_what_was_pretrained_is_fine_tuned_evaluated_and_generates(
    undisturbed, texts, tmp_path, capsys
):
    run_dir, summary = undisturbed
    main(["evaluate", str(run_dir), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["eval/loss"] == pytest.approx(summary["final_eval_loss"], rel=1e-5)
    tuned = command("train", "uls", run_dir=tmp_path / "run", model=run_dir, data=texts)
    assert tuned["initial_eval_loss"] == pytest.approx(summary["final_eval_loss"], rel=1e-5)
    main(["generate", str(run_dir), "--prompt", "red", "--num-tokens", "4"])
    assert capsys.readouterr().out.startswith("red")


def args_of(texts, run_dir, *more):
    flags = {**FLAGS, "data": texts, "run_dir": run_dir, "num_steps": 12, "max_length": 32}
    shown = (str(x) for k, v in flags.items() for x in (f"--{k.replace('_', '-')}", v))
    return ["pretrain", *shown, "--engine", "local", "--seed", "1", *more]


@pytest.mark.slow
@pytest.mark.ci
def test_a_terminal_shows_how_far_it_is_and_where_it_wrote(texts, run_dir, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "50")
    main(args_of(texts, run_dir, "--model", "micro"))
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = [line.strip() for line in re.split(r"[\r\n]+", shown)]
    assert max(len(line) for line in lines if line.startswith("step")) <= 50
    assert any(re.match(r"step 12/12 .*held-out loss [\d.]+", line) for line in lines)
    assert " ".join(lines).startswith("reading data=")
    assert f"written to {run_dir}; train it on with --model {run_dir}" in " ".join(lines)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.ci
def test_stopped_and_resumed_it_ends_with_the_same_parameters(texts, undisturbed, run_dir):
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsim.cli.main", *args_of(texts, run_dir)], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 100
    while not list(run_dir.glob("checkpoints/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    stopped = json.loads((run_dir / "summary.json").read_text())
    assert process.returncode == 75 and 2 <= stopped["steps_done"] < 12
    main(args_of(texts, run_dir, "--resume"))
    found = json.loads((run_dir / "summary.json").read_text())
    assert found["params_sha256"] == undisturbed[1]["params_sha256"]


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.ray
def test_two_workers_give_the_same_parameters(texts, undisturbed, tmp_path, ray_cluster):
    flags = {"engine": "ray", "num_workers": 2, "num_steps": 12, "model": "tiny", **FLAGS}
    found = command("pretrain", run_dir=tmp_path / "run", data=texts, **flags)
    assert found["params_sha256"] == undisturbed[1]["params_sha256"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"batch_size": 10_000}, "batch_size=10000: expected <="),
        (
            {"rows_per_pass": 3, "batch_size": 16},
            "batch_size=16: expected a multiple of rows_per_pass=3",
        ),
        ({"warmup_steps": 2}, "warmup_steps=2: expected in [0, 2)"),
        ({"lora_rank": 2}, "lora_rank=2: expected 0: pre-training is of whole models"),
    ],
)
def test_mistakes_are_one_line(flags, message, texts, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command("pretrain", run_dir=tmp_path / "run", data=texts, **{**FLAGS, **flags})
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_of_one_kind_is_not_resumed_as_the_other(undisturbed, texts, capsys):
    with pytest.raises(SystemExit):
        main(
            f"train uls --data {texts} --run-dir {undisturbed[0]} --epsilon 8 --num-steps 2 "
            "--batch-size 8 --max-length 32 --engine local --resume".split()
        )
    assert "algorithm=uls: expected pretrain" in capsys.readouterr().err
