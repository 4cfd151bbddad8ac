"""The loop that both algorithms share: privatised gradient, optimizer, evaluation, ledger.

An algorithm (`els`, `uls`) gives the privatised gradient of a step; this module does everything
around it. A step is written into the ledger before anything of it becomes visible, and a step that
is run again after a crash is the same step: same units, same noise, same parameters.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any, Protocol

import jax
import numpy as np
import optax

from fedsim import accounting, checkpoint, engine, rundir
from fedsim.clipping import Strategy
from fedsim.config import Algorithm, PrivacyConfig, RunConfig, as_dict, expect, to_json
from fedsim.console import Console
from fedsim.data.dataset import Dataset
from fedsim.engine import Engine
from fedsim.engine.choose import AUTO, choose_strategy
from fedsim.engine.engine import Stats
from fedsim.evaluate import begin_evaluate, headline
from fedsim.files import cache_dir, write_json
from fedsim.keys import SecretKey
from fedsim.ledger import Ledger, OtherBits, gradient_sha256, released_epsilon
from fedsim.metrics import Metrics, table
from fedsim.models import start
from fedsim.optimizers import optimizer, updater
from fedsim.plan import Plan, claims, complete, ledger_head, make_plan, method_for
from fedsim.signals import stop_signals
from fedsim.state import State, restored, results

PACKAGES = ("fedsim", "jax", "jaxlib", "flax", "optax", "numpy", "ray", "dp-accounting")


class Plant(Protocol):
    """What an audit puts into a run and sees of it; see `canaries`."""

    def data(self, data: Dataset) -> Dataset:
        """The data to train on."""
        ...

    def task(self, task: Any, params: Any) -> Any:
        """The task to train, from these parameters."""
        ...

    def watch(self, gradient: Any) -> None:
        """Called with every step's privatised gradient."""
        ...


def train(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    plant: Plant | None = None,
) -> dict[str, Any]:
    """Train, or go on training; returns what `summary.json` holds.

    Nothing is written to the run directory before everything has been found in order.
    Args: plant: of an audit.
    Raises: ConfigError (a user's mistake), EngineError (workers), LedgerError.
    """
    transformation = optimizer(run.optimizer, run.learning_rate)
    reduction = engine.reduction(run)
    stored = rundir.stored_config(run.run_dir, resume=run.resume)
    model = start.find(run.model)
    with ExitStack() as stack:
        if stored:
            stack.enter_context(rundir.lock(run.run_dir))
        data = start.load_data(run, model, console.note)
        if stored:
            data.train.check()
        data = plant.data(data) if plant else data
        identity = {"algorithm": algorithm, "model": start.sha256(model)}
        config: dict[str, Any] = {"identity": identity, "privacy": as_dict(privacy)}
        config["run"] = {name: value for name, value in as_dict(run).items() if name != "seed"}
        key = rundir.key_of(run, stored) or rundir.create_key(run.seed, config, data)
        seal = key.seal(data.train.fingerprint)
        config["identity"] |= {"data_seal": seal, "reduction": reduction}
        if stored:
            rundir.expect_same(run.run_dir, stored, config)
        completed, non_private = complete(algorithm, privacy, data, key=key)
        expect_local_steps(run, completed.group_size if algorithm == Algorithm.ULS else None)
        non_private += outside(run, fresh_model=model is None)
        method = method_for(algorithm, completed, data.train, key)
        fresh = SecretKey.create(key.seed or 0).jax_key("init")  # public, as theta^0 is
        task, params = start.begin(run, model, data, fresh)
        task = plant.task(task, params) if plant else task
        workers = engine.start(run, task)
        workers.note = console.note
        stack.callback(workers.close)
        if stored:
            plan = Plan.from_dict(stored["plan"])
        else:
            console.note("calibrating the noise")
            plan = make_plan(
                algorithm, completed, data.train, method, count(params), non_private, seal
            )
        console.note("starting the workers")
        workers.ready()
        workers.strategy, why = strategy_for(run, stored, workers, params, method, plan.clip)
        host = workers.host(params)
        if not stored:
            config |= {"plan": plan.as_dict(), "versions": versions(), "host": host}
            config["model"] = task.config.as_dict()
            config["strategy"] = {"name": str(workers.strategy), "why": why}
            stack.enter_context(rundir.start(run.run_dir, config, key, data.tokenizer_path))
        console.plan(plan, workers)
        console.note(f"{'clipped sum':17} {workers.strategy} ({why})")
        doubt = rundir.other_bits(stored or config, versions(), host)
        if stored and doubt:
            console.note(f"a step that is run again may have other bits: {doubt}")
        parts = method, plan, data, transformation, workers, run, console, host, doubt
        return Trainer(*parts, plant.watch if plant else None).fit(params, key)


def versions() -> dict[str, str]:
    """Of the packages on which a run's bits depend."""
    return {name: version(name) for name in PACKAGES}


def outside(run: RunConfig, *, fresh_model: bool) -> list[str]:
    """What the guarantee does not cover, by the settings that cannot change it."""
    facts = [] if fresh_model else [f"what model={run.model} was trained on"]
    timed = "the strategy of the clipped sum (timed on units of a draw)"
    return [*facts, timed] if run.strategy == AUTO else facts


def expect_local_steps(run: RunConfig, group_size: int | None) -> None:
    """Raises ConfigError: more steps than a user has examples. group_size: of ULS."""
    most = group_size or 1
    several = f"in [1, {most}], the group size"
    expected = several if most != 1 else "1, with ELS or one example each"
    expect("local_steps", run.local_steps, run.local_steps <= most, expected)


def strategy_for(run, stored, workers, params, method, clip) -> tuple[Strategy, str]:
    """The clipping strategy, and why: a resumed run goes on with its own."""
    if stored:
        return Strategy.parse(stored["strategy"]["name"]), "as the run was started"
    remembered = cache_dir() / "strategies"
    return choose_strategy(workers, params, method.draw(0), clip, run.strategy, remembered)


def count(params: Any) -> int:
    """Number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@dataclasses.dataclass
class Trainer:
    """One run, from its first or its next step to its last."""

    method: Any
    plan: Plan
    data: Dataset
    transformation: optax.GradientTransformation
    engine: Engine
    run: RunConfig
    console: Console
    host: str
    """What workers compute on."""
    other_bits: str
    """Why a step that is run again may have other bits; empty if it may not."""
    watch: Callable[[Any], None] | None = None
    """Called with every privatised gradient."""

    def __post_init__(self):
        sigma = self.plan.noise_multiplier
        self.event = self.method.event(sigma) if sigma else None
        if self.event is not None:
            self.running_epsilon = accounting.RunningEpsilon(
                self.event, self.plan.delta, self.plan.before
            )
        self.eval_every = self.run.eval_every or max(1, self.plan.num_steps // 10)
        self.update = updater(self.transformation)

    def fit(self, params: Any, key: SecretKey) -> dict[str, Any]:
        """Run the steps that are left, then write the summary."""
        state = State(params, self.transformation.init(params), clip_norm=self.plan.clip_norm)
        state = restored(self.run.run_dir, state, self.console)
        settings = rundir.config_sha256(self.run.run_dir)
        first = ledger_head(self.plan, config_sha256=settings, key_seal=key.seal("ledger"))
        ledger = Ledger(self.run.run_dir, first, least=state.step)
        if state.step < self.plan.num_steps:  # a summary of fewer steps than will be released
            (self.run.run_dir / rundir.SUMMARY).unlink(missing_ok=True)
        metrics = Metrics(self.run.run_dir, last_step=state.step or -1)
        try:
            metrics.text("plan", table(self.plan.as_dict()))
            metrics.text("run", table({n: v for n, v in as_dict(self.run).items() if n != "seed"}))
            self._steps(state, ledger, metrics)
            summary = self._summary(state, ledger.chain)
            metrics.hparams(self._hparams(summary))
        finally:
            ledger.close()
            metrics.close()
        write_json(self.run.run_dir / rundir.SUMMARY, summary)
        return summary

    def _steps(self, state: State, ledger: Ledger, metrics: Metrics) -> None:
        """All steps that are left, or as many as there is time for before a stop signal.

        Evaluation and checkpoint of a step are begun after it and finished during the next one.
        """
        with (
            stop_signals() as stop,
            ThreadPoolExecutor(2) as threads,
            checkpoint.Saver(self.run.run_dir, state.step) as saver,
            self.console.steps(state.step, self.plan) as show,
        ):
            finish = self._after(state, metrics, saver)
            rows = threads.submit(self.method.draw, state.step)
            while state.step < self.plan.num_steps and not stop.is_set():
                drawn, rows = rows.result(), threads.submit(self.method.draw, state.step + 1)
                values = self._step(state, ledger, threads, drawn)
                self.engine.read_ahead(rows.result())
                finish()
                metrics.log(state.step, values)
                self.engine.publish(state.step, values)
                show(state.step, {**values, "eval/loss": state.eval_loss})
                finish = self._after(state, metrics, saver)
            if state.step == self.plan.num_steps:
                finish()
            saver.save(state.step, vars(state))
        if state.step < self.plan.num_steps:
            self.console.note(f"stopped after step {state.step}; --resume goes on from there")

    def _after(self, state: State, metrics: Metrics, saver: checkpoint.Saver) -> Callable[[], None]:
        """Begin what is due after a step; the function that is returned finishes it."""
        step, due = state.step, self._due(state.step, self.eval_every) or state.step == 0
        if not due or state.evaluated == step:
            self._save(state, metrics, saver)
            return lambda: None
        losses = begin_evaluate(self.engine, state.params, self.data, self.run.eval_examples)
        then = dataclasses.replace(state)

        def finish() -> None:
            found = losses()
            metrics.log(step, found)
            for each in (state, then):
                each.eval_loss, each.evaluated = headline(found), step
                if step == 0:
                    each.initial_eval_loss = each.eval_loss
            self._save(then, metrics, saver)

        return finish

    def _step(
        self, state: State, ledger: Ledger, thread: ThreadPoolExecutor, rows: np.ndarray
    ) -> dict[str, float]:
        """One step: gradient, ledger, update. Returns its metrics."""
        started, step = time.monotonic(), state.step + 1
        accounted = thread.submit(self._epsilon_so_far, step)  # while workers compute
        grad, stats = self.method.gradient(
            state.params,
            state.step,
            self.engine,
            clip=self.plan.clip_at(state.clip_norm),
            noise_multiplier=self.plan.gradient_noise_multiplier,
            rows=rows,
        )
        values = self._private_values(stats, state.clip_norm)
        epsilon = accounted.result()
        self._record(
            ledger,
            state.step,
            self.event,
            sampling_run=self.plan.sampling_run,
            sampling_accounted=self.plan.sampling_accounted,
            epsilon=to_json(epsilon),
            gradient_sha256=gradient_sha256(grad),
        )
        if self.watch is not None:
            self.watch(grad)
        state.params, state.opt_state = self.update(grad, state.opt_state, state.params)
        if (adaptive := self.plan.adaptive) is not None:
            values["privacy/clip_norm"] = state.clip_norm
            norms = np.where(stats.dropped, math.inf, stats.norms)
            rng = self.method.key.generator("clip quantile", state.step)
            state.clip_norm = adaptive.next(state.clip_norm, norms, rng)
        state.step = step
        state.gradients_computed += int(stats.num_rows.sum())
        seconds = time.monotonic() - started
        state.wall_seconds += seconds
        return {
            **({} if epsilon is None else {self.plan.epsilon_metric: epsilon}),
            "performance/step_seconds": seconds,
            **self.engine.measurements(),
            "non_private/gradients_per_second": int(stats.num_rows.sum()) / seconds,
            "non_private/units_per_second": len(stats.norms) / seconds,
            **values,
        }

    def _record(self, ledger: Ledger, step: int, event: Any, **fields: Any) -> None:
        """Into the ledger. Raises OtherBits only where the same ones could be had."""
        try:
            ledger.record(step, event, **fields)
        except OtherBits as error:
            if not self.other_bits:
                raise
            self.console.note(f"{error} ({self.other_bits})")

    def _due(self, step: int, interval: int) -> bool:
        """Whether what is done every `interval` steps, and after the last, is done after `step`."""
        return step % interval == 0 or step == self.plan.num_steps

    def _save(self, state: State, metrics: Metrics, saver: checkpoint.Saver) -> None:
        if state.step and self._due(state.step, self.run.checkpoint_every):
            saver.save(state.step, vars(state))
            metrics.flush()

    def _private_values(self, stats: Stats, clip_norm: float) -> dict[str, float]:
        """What the step looked like, computed from private data without noise."""
        values = {
            "cohort_size": len(stats.norms),
            "gradients": int(stats.num_rows.sum()),
            "dropped_units": int(stats.dropped.sum()),
        }
        kept = ~stats.dropped
        if kept.any():
            norms = stats.norms[kept]
            values |= {
                "loss": float(stats.losses[kept].mean()),
                "norm_median": float(np.median(norms)),
                "norm_p90": float(np.quantile(norms, 0.9)),
                "clip_fraction": float((norms > clip_norm).mean()),
            }
        return {f"non_private/{name}": value for name, value in values.items()}

    def _epsilon_so_far(self, num_steps: int) -> float | None:
        """Epsilon after so many steps, at every reporting interval; None in between."""
        if self.event is None:
            return math.inf
        return self.running_epsilon(num_steps) if self._due(num_steps, self.run.log_every) else None

    def _summary(self, state: State, chain: str) -> dict[str, Any]:
        """What `summary.json` holds; epsilon is recomputed from the ledger."""
        epsilon = released_epsilon(self.run.run_dir, self.plan.delta)
        return {**claims(self.plan, epsilon, chain), **results(vars(state)), "host": self.host}

    def _hparams(self, summary: dict[str, Any]) -> dict[str, Any]:
        run = {name: getattr(self.run, name) for name in ("model", "optimizer", "learning_rate")}
        names = ("algorithm", "target_epsilon", "budget", "group_size", "clip_norm", "num_steps")
        return {**run, **{name: summary[name] for name in names}}
