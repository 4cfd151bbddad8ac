"""Pre-training on public text, without privacy, as before the paper's experiments (Section 5).

Plain stochastic gradient descent: each example once per pass over the data, the mean gradient of a
batch, Adafactor, cosine decay. The engines are those of private training: a unit is a few examples
of the batch and nothing is clipped, so the sum of units is the batch's gradient. Nobody whose text
it sees is protected, and no budget counts it: it is for public text.

The result is a model in Hugging Face's format, which `fedsim train --model OUT` starts from. The
same command goes on where one was stopped. The paper's model, on C4 as `experiments.data c4`
prepares it:

    python -m experiments.pretraining --data data/c4 --num-steps 400000 --out models/c4
"""

import argparse
import dataclasses
import functools
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from experiments.harness import experiment
from fedsim import engine, files
from fedsim.clipping import Clip, Strategy
from fedsim.config import RunConfig, run_config
from fedsim.errors import expect
from fedsim.evaluate import evaluate, headline
from fedsim.keys import SecretKey
from fedsim.models import weights
from fedsim.run import Console, State, checkpoint, load_data, make_task, restored, save
from fedsim.signals import stop_signals
from fedsim.training.optimizers import Diverged, update_rule, updater

NO_CLIP = Clip(math.inf, in_float32=True)
SETTINGS = "settings.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the parameters depend on, beside data, model and seed."""

    num_steps: int
    batch_size: int = 512
    """Examples of a step, a multiple of rows_per_pass."""
    rows_per_pass: int = 16
    warmup_steps: int = 0
    """Steps in which the learning rate rises; below num_steps."""

    def __post_init__(self):
        rows = self.rows_per_pass
        whole = rows > 0 and self.batch_size % rows == 0
        expect("batch_size", self.batch_size, whole, f"a multiple of rows_per_pass={rows}")
        last = self.num_steps
        expect("warmup_steps", self.warmup_steps, 0 <= self.warmup_steps < last, f"below {last}")


def schedule(settings: Settings, peak: float) -> optax.Schedule:
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


def pretrain(settings: Settings, run: RunConfig, console: Console) -> bool:
    """Pre-train a fresh model into `run.run_dir`, or go on; False if a signal stopped it.

    Until it ends, checkpoints are in a directory beside it.
    Raises: ConfigError: other settings than it was begun with, or the parameters ran away.
    """
    out, work = run.run_dir, run.run_dir.with_name(run.run_dir.name + ".training")
    if weights.is_directory(out):
        return True
    work.mkdir(parents=True, exist_ok=True)
    begun = {**dataclasses.asdict(settings), "data": run.data.source, "model": run.model.source}
    begun |= {"learning_rate": run.learning_rate, "seed": run.seed}
    if (work / SETTINGS).exists():
        was = files.read_json(work / SETTINGS)
        expect(
            "out",
            work,
            was == begun,
            f"a pre-training that was begun with these settings, not {was}",
        )
    files.write_json(work / SETTINGS, begun)

    assert run.learning_rate is not None, "of the command line"
    rate = schedule(settings, run.learning_rate)
    rule = update_rule(run, rate)
    key = SecretKey.create(run.seed, "pretrain")
    data = load_data(run.data, None, console.note)
    most = data.train.num_examples
    expect("batch_size", settings.batch_size, settings.batch_size <= most, f"<= {most}")
    task, params = make_task(run, None, data, SecretKey.create(key.seed or 0).jax_key("init"))
    workers = engine.create(run.engine, task, warn=console.warn)
    try:
        workers.ready()
        state = restored(work, State(params, rule.init(params)))
        if state.step:
            console.note(f"resuming after step {state.step}")
        batches = Batches(data.train.lengths, settings.batch_size, settings.rows_per_pass, key)
        steps(settings, run, work, state, batches, workers, updater(rule, params), data, console)
    finally:
        workers.close()
    if state.step < settings.num_steps:
        return False
    loss = {"loss_before": state.initial_eval_loss, "loss": state.eval_loss}
    card = {"pretraining.json": json.dumps({**begun, **loss}) + "\n"}
    weights.save(out, task.config, state.params, data.tokenizer_path, None, card)
    shutil.rmtree(work)
    return True


def steps(
    settings: Settings,
    run: RunConfig,
    work: Path,
    state: State,
    batches: Batches,
    workers: engine.Engine,
    update: Any,
    data: Any,
    console: Console,
) -> None:
    """The remaining steps, or those before a signal."""
    last, strategy = settings.num_steps, Strategy("scan", settings.rows_per_pass)
    write = functools.partial(save, work)
    every = run.eval_every or max(1, last // 10)

    def loss() -> float:
        return headline(evaluate(workers, state.params, data, run.eval_examples or 512))

    with (
        stop_signals() as stop,
        checkpoint.Saver(write, state.step) as saver,
        console.steps(state.step, last) as show,
    ):
        if not state.step:
            state.initial_eval_loss = state.eval_loss = loss()
        while state.step < last and not stop.is_set():
            rows, began = batches.draw(state.step), time.monotonic()
            total, stats = workers.clipped_sum(state.params, rows, NO_CLIP, strategy)
            grad = jax.tree.map(lambda leaf: leaf / np.float32(len(rows)), total)  # noqa: B023
            state.params, state.opt_state = update(grad, state.opt_state, state.params)
            if not math.isfinite(float(optax.tree.norm(state.params))):
                raise Diverged(f"the parameters are not finite after step {state.step + 1}")
            state.step, seconds = state.step + 1, time.monotonic() - began
            if state.step % every == 0 or state.step == last:
                state.eval_loss = loss()
            if saver.due(state.step, run.checkpoint_every):
                saver.save(state.step, vars(state))
            losses = {"non_private/loss": float(stats.losses.mean()), "eval/loss": state.eval_loss}
            show(state.step, {**losses, "performance/step_seconds": seconds}, 0.0)
        saver.save(state.step, vars(state))


@experiment.mistakes()
def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--data", required=True, help="built data, a file, or pydocs")
    parser.add_argument("--model", default="paper", help="the size of the fresh model")
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--num-steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=Settings.batch_size)
    parser.add_argument("--rows-per-pass", type=int, default=Settings.rows_per_pass)
    parser.add_argument("--warmup-steps", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=0.1, help="the peak")
    parser.add_argument("--max-length", type=int, help="of data that are built on the way")
    parser.add_argument("--engine", choices=("ray", "local"), default="ray")
    parser.add_argument("--num-workers", type=int)
    given = parser.parse_args()
    settings = Settings(given.num_steps, given.batch_size, given.rows_per_pass, given.warmup_steps)
    names = ("data", "model", "learning_rate", "max_length", "engine", "num_workers")
    how = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    run = run_config(run_dir=given.out, optimizer="adafactor", seed=0, checkpoint_every=100, **how)
    if not pretrain(settings, run, Console()):
        raise KeyboardInterrupt
    print(f"{given.out}: start from it with fedsim train --model {given.out}")


if __name__ == "__main__":
    main()
