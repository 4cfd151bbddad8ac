"""Pre-training on public text, without privacy, as before the paper's experiments.

Plain stochastic gradient descent: each example once per pass over the data, the mean gradient of a
batch, Adafactor, cosine decay. The engines are those of private training: a unit is a few examples
of the batch and nothing is clipped, so the sum of units is the batch's gradient. The users of the
text have no protection; summary, console and metrics say so.
"""

import dataclasses
import functools
import math
import time
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import optax

from fedsim.budget import Applicant, admitted
from fedsim.clipping import Clip, Strategy, num_coordinates
from fedsim.config import PretrainConfig, RunConfig, as_dict, to_json
from fedsim.data import Dataset
from fedsim.engine import Engine
from fedsim.errors import expect
from fedsim.evaluate import evaluate, headline
from fedsim.files import write_json
from fedsim.keys import SecretKey
from fedsim.run import (
    Console,
    Metrics,
    State,
    checkpoint,
    directory,
    expect_loggers,
    open_loggers,
    restored,
    save,
    visible,
)
from fedsim.signals import stop_signals
from fedsim.training.open import open_run, phase_of, wait_for
from fedsim.training.optimizers import diverged, is_finite, settled, update_rule, updater

WARNING = "non-private: pre-training protects nobody whose text it sees"
NO_CLIP = Clip(math.inf, in_float32=True)


def pretrain(settings: PretrainConfig, run: RunConfig, console: Console) -> dict[str, Any]:
    """Pre-train, or resume a pre-training; return the contents of `summary.json`.

    Raises:
      ConfigError: the settings do not fit the data, the model or each other.
      EngineError: workers failed.
    """
    run = settled(run, None)
    expect_loggers(run.log_to)
    assert run.learning_rate is not None
    rate = schedule(settings, run.learning_rate)
    transformation = update_rule(run, rate)
    rank, adapter = run.model.lora_rank, run.model.adapter
    expect("lora_rank", rank, rank == 0, "0: pre-training is of whole models")
    expect("strict", run.strict, not run.strict, "false: pre-training has no guarantee")
    expect("adapter", adapter, adapter is None, "none: pre-training is of whole models")
    expect("spend_rest", run.spend_rest, not run.spend_rest, "nothing: pre-training has no noise")
    expect("limit_epsilon", run.limit_epsilon, run.limit_epsilon is None, "nothing: it has none")
    expect("local_steps", run.local_steps, run.local_steps == 1, "1: there are no users")
    for name, least in (("schedule", "constant"), ("warmup", 0), ("ema", 0)):
        value = getattr(run, name)
        expect(name, value, value == least, f"{least}: pre-training has a cosine of its own")
    with open_run(directory.PRETRAIN, settings, run, console) as opened:
        data, most = opened.data, opened.data.train.num_examples
        expect("batch_size", settings.batch_size, settings.batch_size <= most, f"<= {most}")
        applicant = Applicant.of(run, data.train, None, directory.PRETRAIN)
        applicant.expect_place()
        workers, task, params = opened.start_engine()
        console.warn(WARNING)
        wait_for(workers, console)
        opened.begin(task)
        entry = applicant.entry(opened.key.seal("ledger"), None, (0.0, 0.0), WARNING)
        trainer = Pretrainer(
            settings=settings,
            run=run,
            data=data,
            transformation=transformation,
            rate=rate,
            engine=workers,
            console=console,
            key=opened.key,
        )
        with admitted(applicant, entry):
            summary = trainer.fit(params)
        console.note(f"written to {run.run_dir}; train it on with --model {run.run_dir}")
        return summary


def schedule(settings: PretrainConfig, peak: float) -> optax.Schedule:
    """Learning rate: linear rise to the peak in `warmup_steps`, then cosine decay to zero."""
    if not settings.warmup_steps:
        return optax.cosine_decay_schedule(peak, settings.num_steps)
    return optax.warmup_cosine_decay_schedule(0.0, peak, settings.warmup_steps, settings.num_steps)


class Batches:
    """The examples of each step: a pure function of (key, step).

    The examples left over at the end of a pass are skipped.
    """

    def __init__(self, lengths: np.ndarray, batch_size: int, rows_per_pass: int, key: SecretKey):
        """Args: lengths: tokens of each example, [examples]."""
        self.lengths, self.batch_size = lengths, batch_size
        self.rows_per_pass, self.key = rows_per_pass, key
        self._order = functools.lru_cache(maxsize=1)(self._order_of)

    def draw(self, step: int) -> np.ndarray:
        """Rows [passes, rows per pass], examples of similar length together."""
        epoch, batch = divmod(step, len(self.lengths) // self.batch_size)
        rows = self._order(epoch)[batch * self.batch_size :][: self.batch_size]
        rows = rows[np.argsort(self.lengths[rows], kind="stable")]
        return rows.astype(np.int64).reshape(-1, self.rows_per_pass)

    def _order_of(self, epoch: int) -> np.ndarray:
        order = np.arange(len(self.lengths), dtype=np.uint32)
        self.key.generator("pretrain", epoch).shuffle(order)
        return order


@dataclasses.dataclass
class Pretrainer:
    """One pre-training, from its first or its next step to its last."""

    settings: PretrainConfig
    run: RunConfig
    data: Dataset
    transformation: optax.GradientTransformation
    rate: optax.Schedule
    engine: Engine
    console: Console
    key: SecretKey

    def __post_init__(self):
        self.update = updater(self.transformation)
        self.strategy = Strategy("scan", self.settings.rows_per_pass)
        self.eval_every = self.run.eval_every or max(1, self.settings.num_steps // 10)

    def fit(self, params: Any) -> dict[str, Any]:
        """Run the remaining steps, write the summary and return it."""
        run_dir = self.run.run_dir
        state = State(params, self.transformation.init(params))
        state = restored(run_dir, state, self.console)
        if state.step < self.settings.num_steps:
            (run_dir / directory.SUMMARY).unlink(missing_ok=True)
        metrics = self._metrics(state.step or -1)
        try:
            self._steps(state, metrics)
        finally:
            metrics.close()
        summary = self._summary(state)
        write_json(run_dir / directory.SUMMARY, summary, mode=0o600)
        return summary

    def _metrics(self, last_step: int) -> Metrics:
        """The metrics and loggers of the run, after `last_step`."""
        settings, run = as_dict(self.settings), as_dict(self.run)
        about = {"privacy": WARNING, **settings, **run}
        names = ("model", "optimizer", "learning_rate")
        tables = {
            "pretrain": {name: value for name, value in about.items() if name != "seed"},
            "hparams": {**settings, **{name: run[name] for name in names}},
        }
        identity = directory.config_sha256(self.run.run_dir)
        metrics = Metrics(self.run.run_dir, last_step)  # first: its file may be damaged
        warn = self.console.warn
        metrics.loggers = open_loggers(self.run, None, tables, identity, last_step, warn)
        return metrics

    def _steps(self, state: State, metrics: Metrics) -> None:
        train, last = self.data.train, self.settings.num_steps
        batches = Batches(
            train.lengths, self.settings.batch_size, self.settings.rows_per_pass, self.key
        )
        write = functools.partial(save, self.run.run_dir)
        with (
            stop_signals() as stop,
            checkpoint.Saver(write, state.step) as saver,
            self.console.steps(state.step, last) as show,
        ):
            first = state.step
            if not state.step:
                with phase_of(self.engine, self.console, "evaluation after step 0"):
                    self._evaluate(state, metrics)
                state.initial_eval_loss = state.eval_loss
            while state.step < last and not stop.is_set():
                phase = phase_of(self.engine, self.console, "first step")
                with phase if state.step == first else nullcontext():
                    values = self._step(state, batches)
                metrics.log(state.step, values)
                self.engine.publish(state.step, visible(None, values))
                if state.step % self.eval_every == 0 or state.step == last:
                    self._evaluate(state, metrics)
                if saver.due(state.step, self.run.checkpoint_every):
                    saver.save(state.step, vars(state))
                    metrics.flush()
                show(state.step, {**values, "eval/loss": state.eval_loss})
            saver.save(state.step, vars(state))
        if state.step < last:
            self.console.note(f"stopped after step {state.step}; --resume continues from there")

    def _step(self, state: State, batches: Batches) -> dict[str, float]:
        started = time.monotonic()
        rows = batches.draw(state.step)
        total, stats = self.engine.clipped_sum(state.params, rows, NO_CLIP, self.strategy)
        grad = jax.tree.map(lambda leaf: leaf / np.float32(len(rows)), total)
        state.params, state.opt_state = self.update(grad, state.opt_state, state.params)
        rate = float(np.asarray(self.rate(state.step)))
        if not is_finite(state.params):
            raise diverged(self.run, state.step + 1, "the parameters are not finite")
        state.step += 1
        state.gradients_computed += rows.size
        seconds = time.monotonic() - started
        state.wall_seconds += seconds
        tokens = int(batches.lengths[rows.ravel()].sum())
        return {
            "non_private/loss": float(stats.losses.mean()),
            "non_private/dropped_passes": int(stats.dropped.sum()),
            "learning_rate": rate,
            "performance/step_seconds": seconds,
            "performance/tokens_per_second": tokens / seconds,
            **self.engine.measurements(),
        }

    def _evaluate(self, state: State, metrics: Metrics) -> None:
        losses = evaluate(self.engine, state.params, self.data, self.run.eval_examples)
        metrics.log(state.step, losses)
        state.eval_loss, state.evaluated = headline(losses), state.step

    def _summary(self, state: State) -> dict[str, Any]:
        return {
            "algorithm": "pretrain",
            "privacy": WARNING,
            "epsilon": "inf",
            **as_dict(self.settings),
            "optimizer": self.run.optimizer,
            "learning_rate": self.run.learning_rate,
            "num_parameters": num_coordinates(state.params),
            "num_examples": self.data.train.num_examples,
            "num_tokens": self.data.train.num_tokens,
            "steps_done": state.step,
            "initial_eval_loss": to_json(state.initial_eval_loss),
            "final_eval_loss": to_json(
                state.eval_loss if state.evaluated == state.step else math.nan
            ),
            "loss_unit": self.data.loss_unit,
            "params_sha256": checkpoint.params_sha256(state.params),
            "gradients_computed": state.gradients_computed,
            "wall_seconds": round(state.wall_seconds, 3),
        }
