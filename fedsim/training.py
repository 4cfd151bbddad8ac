"""The loop that both algorithms share: privatised gradient, optimizer, evaluation, ledger.

An algorithm (`els`, `uls`) gives the privatised gradient of a step; this module does everything
around it. A step is written into the ledger before anything of it becomes visible, and a step that
is run again after a crash is the same step: same units, same noise, same parameters.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import numpy as np
import optax

from fedsim import accounting
from fedsim.budget.admission import Applicant, shortened
from fedsim.clipping import Clip, Strategy
from fedsim.clipping.clip import num_coordinates
from fedsim.config import (
    Algorithm,
    EngineConfig,
    PrivacyConfig,
    RunConfig,
    as_dict,
    settings_of,
    to_json,
)
from fedsim.data.dataset import Dataset
from fedsim.els import ELS
from fedsim.engine import Engine, Stats
from fedsim.engine.autotune import AUTO, choose_strategy
from fedsim.engine.environment import versions
from fedsim.errors import expect
from fedsim.evaluate import begin_evaluate, headline
from fedsim.files import cache_dir, write_json
from fedsim.keys import SecretKey
from fedsim.mechanism import NoisyMean
from fedsim.optimizers import Diverged, averaged, diverged, is_finite, rate_of, update_rule, updater
from fedsim.plan import (
    Plan,
    before_of,
    claimed_fields,
    complete,
    ledger_head,
    make_plan,
    method_for,
    planned_phases,
    sharing,
)
from fedsim.recipe import UPDATE, Noise, settled
from fedsim.run import checkpoint, directory, released
from fedsim.run.console import Console
from fedsim.run.cost import cost, cost_rows
from fedsim.run.directory import StoredRun
from fedsim.run.doubts import doubts
from fedsim.run.ledger import Ledger, OtherBits, released_epsilon
from fedsim.run.metrics import Metrics, table
from fedsim.run.setup import Plant, Source, open_run, wait_for
from fedsim.run.signals import stop_signals
from fedsim.run.state import State, restored, results, save
from fedsim.uls import ULS

Callback = Callable[[int, dict[str, float]], None]
MOST_LOSS = 1000.0  # times the first one, or nats: nothing comes of a training beyond


def train(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    source: Source | None = None,
    plant: Plant | None = None,
    callback: Callback | None = None,
    trial: bool = False,
    held_out: bool = True,
    rehearsed: EngineConfig | None = None,
) -> dict[str, Any]:
    """Train, or go on training; returns what `summary.json` holds.

    Nothing is written to the run directory before everything has been found in order.
    Args:
      source: data and task, instead of those that the settings name.
      plant: of an audit.
      callback: called after every step with its number, from 1, and its metrics.
      trial: it is one of a private selection, which is counted in the ledger of the data instead.
      held_out: evaluate on held-out users, which is done without noise.
      rehearsed: train nothing and write nothing, but return the plan and what it would cost with
        this engine; see `run.cost`.
    Raises: ConfigError (a user's mistake), EngineError (workers), LedgerError.
    """
    privacy = as_started(privacy, run)
    update_of(settled(run, Noise(1.0, 1.0, 1)), privacy.num_steps)  # a mistake is found now
    unproven = unproven_strategy(run.engine)
    opening = open_run(algorithm, privacy, run, console, source=source, plant=plant)
    with opening as opened:
        if not held_out:
            opened.data = dataclasses.replace(opened.data, eval_users=None)
        data, key = opened.data, opened.key
        completed, non_private = complete(algorithm, privacy, data, key=key)
        if opened.stored and opened.stored.plan:  # of versions that might choose otherwise
            completed = dataclasses.replace(completed, bands=opened.stored.plan.bands_given)
        expect_local_steps(run, completed.group_size if algorithm == Algorithm.ULS else None)
        non_private += outside(run, fresh_model=opened.model is None, own_task=source is not None)
        method = method_for(algorithm, completed, data.train, key)
        kind = "train" if plant is None else "audit"
        applicant = Applicant.of(run, data.train, completed.delta, kind)
        if run.spend_rest and not opened.stored:
            completed = shortened(applicant, method, completed, before_of(completed))
            steps, epsilon = completed.num_steps, completed.epsilon
            opened.settings = dataclasses.replace(privacy, num_steps=steps, epsilon=epsilon)
        workers, task, params = opened.start_engine()
        if opened.stored:
            plan = opened.stored.plan
            assert plan is not None, "a run of train has one"
            same = sharing(data.train, method, key) == plan.shared
            again = "the pool or the groups that the run began with: go on with its packages"
            expect("data", "other texts of the same ones", same, again)
        else:
            size, seal = num_coordinates(params), opened.identity.data_seal
            facts = (size, non_private, seal)
            how = {"unproven": unproven, "trial": trial}
            with console.phase("calibrating the noise"):
                plan = make_plan(algorithm, completed, data.train, method, *facts, **how)
            for doubt in doubts(plan, data):
                console.note(f"warning: {doubt}")
        planned = planned_phases(plan, method)
        entry = applicant.entry(key.seal("ledger"), planned, plan.slack, plan.label)
        if not trial:
            applicant.expect_room(entry)
        wait_for(workers, console)
        console.plan(plan, workers)
        opened.run = run = settled_by(plan, opened.stored, run, fresh=opened.model is None)
        console.update(run)
        with console.phase("compiling, and timing ways to compute the clipped sum") as phase:
            of_run = {"num_units": plan.num_steps * plan.expected_count, "heard": phase.at}
            facts = (workers, params, method, plan.clip)
            strategy, why = strategy_for(run.engine, opened.stored, *facts, **of_run)
        if rehearsed is not None:
            update = update_of(run, plan.num_steps)
            found = cost(workers, method.draw(0), params, plan, strategy, update, rehearsed)
            console.rows(cost_rows(found))
            return {**plan.as_dict(), **found}
        host = workers.host(params)
        named = {"name": str(strategy), "why": why}
        stored = opened.begin(task, plan=plan, host=host, strategy=named)
        drawing = directory.drawing_key(key, stored)
        if drawing is not key:  # of a seed; the pool of ELS takes seconds for many users
            method = method_for(algorithm, completed, data.train, key, drawing)
        console.note(f"{'clipped sum':17} {strategy} ({why})")
        doubt = directory.other_bits(stored, versions(), host)
        if opened.stored and doubt:
            kept = "what it released is taken as it was kept, or left out"
            console.note(f"a step that is run again may have other bits: {doubt}: then {kept}")
        trainer = Trainer(
            method=method,
            plan=plan,
            data=data,
            transformation=update_of(run, plan.num_steps),
            engine=workers,
            strategy=strategy,
            run=run,
            console=console,
            host=host,
            other_bits=doubt,
            watch=plant.watch if plant else None,
            callback=callback,
        )
        return trainer.fit(params, key, nullcontext() if trial else applicant.admitted(entry))


def as_started(privacy: PrivacyConfig, run: RunConfig) -> PrivacyConfig:
    """The settings, with the steps that fitted when the run was started, if it goes on."""
    if not (run.spend_rest and run.resume and (run.run_dir / directory.CONFIG).exists()):
        return privacy
    stored = directory.load(run.run_dir).privacy
    return dataclasses.replace(privacy, num_steps=stored.num_steps, epsilon=stored.epsilon)


def outside(run: RunConfig, *, fresh_model: bool, own_task: bool = False) -> list[str]:
    """What the guarantee does not cover, by the settings that cannot change it."""
    facts = [] if fresh_model else [f"what model={run.model.source} was trained on"]
    if own_task:
        facts.append("the task's own code: its first parameters, and how it makes rows of texts")
    timed = "the strategy of the clipped sum (timed on units of a draw)"
    return [*facts, timed] if run.engine.strategy == AUTO else facts


def update_of(run: RunConfig, num_steps: int) -> optax.GradientTransformation:
    """The optimizer of a settled run, with its schedule."""
    return update_rule(run, rate_of(run, num_steps))


def settled_by(plan: Plan, stored: StoredRun | None, run: RunConfig, *, fresh: bool) -> RunConfig:
    """The run with nothing of its update left open: as it was started, or by the rule."""
    if stored is not None:
        return dataclasses.replace(run, **{name: getattr(stored.run, name) for name in UPDATE})
    bound = plan.clip.sensitivity
    stddev = bound * plan.gradient_noise_multiplier / plan.expected_count
    return settled(run, Noise(stddev, bound, plan.num_steps), fresh=fresh)


def unproven_strategy(config: EngineConfig) -> str | None:
    """The strategy that was asked for, if its contributions are not proven to be at most C."""
    named = None if config.strategy == AUTO else Strategy.parse(config.strategy)
    return None if named is None or named.proven else str(named)


def expect_local_steps(run: RunConfig, group_size: int | None) -> None:
    """Raises ConfigError: more steps than a user has examples. group_size: of ULS."""
    most = group_size or 1
    several = f"in [1, {most}], the group size (--group-size)"
    expected = several if group_size else "1, with ELS"
    expect("local_steps", run.local_steps, run.local_steps <= most, expected)


def strategy_for(
    config: EngineConfig,
    stored: StoredRun | None,
    workers: Engine,
    params: Any,
    method: ELS | ULS,
    clip: Clip,
    **options: Any,
) -> tuple[Strategy, str]:
    """The clipping strategy, and why: a resumed run goes on with its own.

    Args: options: of `choose_strategy`.
    """
    if stored:
        return Strategy.parse(stored.strategy["name"]), "as the run was started"
    remembered = cache_dir() / "strategies"
    asked = (clip, config.strategy, remembered)
    return choose_strategy(workers, params, method.draw(0), *asked, **options)


@dataclasses.dataclass
class Trainer:
    """One run, from its first or its next step to its last."""

    method: ELS | ULS
    plan: Plan
    data: Dataset
    transformation: optax.GradientTransformation
    engine: Engine
    strategy: Strategy
    """How clipped sums are computed."""
    run: RunConfig
    console: Console
    host: str
    """What workers compute on."""
    other_bits: str
    """Why a step that is run again may have other bits; empty if it may not."""
    watch: Callable[[Any], None] | None = None
    """Called with every privatised gradient."""
    callback: Callback | None = None
    """Called with every step's number and metrics."""

    def __post_init__(self):
        sigma = self.plan.noise_multiplier
        self.event = self.method.event(sigma) if sigma else None
        if self.event is not None:
            self.running_epsilon = accounting.RunningEpsilon(
                self.event, self.plan.delta, self.plan.before
            )
        self.add_noise = self.plan.add_noise()
        self.eval_every = self.run.eval_every or max(1, self.plan.num_steps // 10)
        self.update = updater(self.transformation)

    def fit(
        self, params: Any, key: SecretKey, counted: AbstractContextManager[None]
    ) -> dict[str, Any]:
        """Run the steps that are left, then write the summary.

        Args: counted: entered when what is there of the run was found in order: counts it in the
          ledger of the data.
        """
        state = State(
            params,
            self.transformation.init(params),
            average=params if self.run.ema else None,
            clip_norm=self.plan.clip_norm,
        )
        state = restored(self.run.run_dir, state, self.console)
        settings = directory.config_sha256(self.run.run_dir)
        first = ledger_head(self.plan, config_sha256=settings, key_seal=key.seal("ledger"))
        ledger = Ledger(self.run.run_dir, first, least=state.step)
        metrics = Metrics(self.run.run_dir, last_step=state.step or -1)
        with closing(ledger), closing(metrics), counted:
            if state.step < self.plan.num_steps:  # a summary of fewer steps than will be released
                (self.run.run_dir / directory.SUMMARY).unlink(missing_ok=True)
            metrics.text("plan", table(self.plan.as_dict()))
            metrics.text("run", table({n: v for n, v in as_dict(self.run).items() if n != "seed"}))
            self._steps(state, ledger, metrics)
            summary = self._summary(state, ledger.chain)
            metrics.hparams(self._hparams(summary))
            write_json(self.run.run_dir / directory.SUMMARY, summary, mode=0o600)
        return summary

    def _steps(self, state: State, ledger: Ledger, metrics: Metrics) -> None:
        """All steps that are left, or as many as there is time for before a stop signal.

        Evaluation and checkpoint of a step are begun after it and finished during the next one.
        """
        with (
            stop_signals() as stop,
            ThreadPoolExecutor(2) as threads,
            checkpoint.Saver(self._write, state.step) as saver,
            self.console.steps(state.step, self.plan) as show,
        ):
            finish = self._after(state, metrics, saver)
            rows = threads.submit(self.method.draw, state.step)
            first = state.step
            while state.step < self.plan.num_steps and not stop.is_set():
                drawn, rows = rows.result(), threads.submit(self.method.draw, state.step + 1)
                with self._first("the first step, lane by lane", state.step == first):
                    values = self._step(state, ledger, threads, drawn)
                self.engine.read_ahead(rows.result())
                with self._first("the first evaluation, lane by lane", state.step == 1):
                    finish()
                metrics.log(state.step, values)
                self.engine.publish(state.step, values)
                shown = {**values, "eval/loss": state.eval_loss}
                if self.callback is not None:
                    self.callback(state.step, shown)
                show(state.step, shown)
                finish = self._after(state, metrics, saver)
            if state.step == self.plan.num_steps:
                finish()
            saver.save(state.step, vars(state))
        if state.step < self.plan.num_steps:
            self.console.note(f"stopped after step {state.step}; --resume goes on from there")

    @contextmanager
    def _first(self, what: str, is_first: bool) -> Iterator[None]:
        """Say how far it has come: of a first one nobody knows how long it takes."""
        if not is_first:
            yield
            return
        with self.console.phase(what) as phase, self.engine.telling(phase.at):
            yield

    def _after(self, state: State, metrics: Metrics, saver: checkpoint.Saver) -> Callable[[], None]:
        """Begin what is due after a step; the function that is returned finishes it."""
        step, due = state.step, self._due(state.step, self.eval_every) or state.step == 0
        if not due or state.evaluated == step:
            self._save(state, metrics, saver)
            return lambda: None
        losses = begin_evaluate(self.engine, state.released, self.data, self.run.eval_examples)
        then = dataclasses.replace(state)

        def finish() -> None:
            found = losses()
            metrics.log(step, found)
            most = MOST_LOSS * max(1.0, state.initial_eval_loss) if step else math.inf
            if not all(loss <= most for loss in found.values()):  # nan is not, either
                raise self._diverged(step, f"the loss is {max(found.values()):g}")
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
        noisy, stats = self.method.gradient(
            state.params,
            state.step,
            self.engine,
            clip=self.plan.clip_at(state.clip_norm),
            noise_multiplier=self.plan.gradient_noise_multiplier,
            strategy=self.strategy,
            add_noise=self.add_noise,
            rows=rows,
        )
        values = self._private_values(stats, state.clip_norm)
        epsilon, clip_norm = accounted.result(), state.clip_norm
        if (adaptive := self.plan.adaptive) is not None:
            values["privacy/clip_norm"] = clip_norm
            norms = stats.counted_norms
            rng = self.method.key.generator("clip quantile", state.step)
            clip_norm = adaptive.next(clip_norm, norms, rng)
        found = self._release(ledger, state.step, noisy, clip_norm, epsilon)
        if found is not None:
            noisy, state.clip_norm = found
            grad = noisy.values()
            if self.watch is not None:
                self.watch(grad)
            state.params, state.opt_state = self.update(grad, state.opt_state, state.params)
            if not is_finite(state.params):
                raise self._diverged(step, "the parameters are not finite")
        else:
            state.lost_steps += 1
        state.step = step
        if self.run.ema:
            state.average = averaged(state.average, state.params, self.run.ema, step)
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

    def _diverged(self, step: int, what: str) -> Diverged:
        """What ends a run of which nothing can come any more. All that it looks at is public."""
        epsilon = released_epsilon(self.run.run_dir, self.plan.delta)
        spent = (
            f"epsilon {epsilon:.4f} is spent" if math.isfinite(epsilon) else "no privacy is left"
        )
        return diverged(self.run, step, what, f"; {spent}")

    def _release(
        self,
        ledger: Ledger,
        step: int,
        noisy: NoisyMean,
        clip_norm: float,
        epsilon: float | None,
    ) -> tuple[NoisyMean, float] | None:
        """What `step` releases, and the next step's C, both durable.

        Guarantees: a step releases once. One that is run again releases what it did before: the
          same bits, or what was kept of them, or nothing (None), though it was paid for.
        Raises: OtherBits: where the same bits could be had.
        """
        run_dir, sha256 = self.run.run_dir, released.digest(noisy, clip_norm)
        if step == ledger.num_steps and self.plan.noise_multiplier:
            released.keep(run_dir, step, noisy, clip_norm)
        try:
            ledger.record(
                step,
                self.event,
                sampling_run=self.plan.sampling_run,
                sampling_accounted=self.plan.sampling_accounted,
                epsilon=to_json(epsilon),
                gradient_sha256=sha256,
            )
            return noisy, clip_norm
        except OtherBits:
            if not self.other_bits:
                raise
        before = released.kept(run_dir, step, noisy, str(ledger.digest(step)))
        outcome = "what it released is taken, as it was kept" if before else "is left out"
        why = f"was released before with other bits ({self.other_bits})"
        self.console.note(f"step {step} {why}: {outcome}")
        return before

    def _due(self, step: int, interval: int) -> bool:
        """Whether what is done every `interval` steps, and after the last, is done after `step`."""
        return step % interval == 0 or step == self.plan.num_steps

    def _save(self, state: State, metrics: Metrics, saver: checkpoint.Saver) -> None:
        last = state.step == self.plan.num_steps
        if state.step and (last or saver.due(state.step, self.run.checkpoint_every)):
            saver.save(state.step, vars(state))
            metrics.flush()

    def _write(self, step: int, state: dict[str, Any]) -> None:
        save(self.run.run_dir, step, state)
        released.drop(self.run.run_dir, step)  # the checkpoint has it

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
        return {
            **claimed_fields(self.plan, epsilon, chain),
            **results(vars(state)),
            "host": self.host,
        }

    def _hparams(self, summary: dict[str, Any]) -> dict[str, Any]:
        run = {
            name: settings_of(self.run)[name] for name in ("model", "optimizer", "learning_rate")
        }
        names = ("algorithm", "target_epsilon", "budget", "group_size", "clip_norm", "num_steps")
        return {**run, **{name: summary[name] for name in names}}
