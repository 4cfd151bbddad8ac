"""The training loop: gradient, ledger, update, evaluation and checkpoint of each step.

A step is written into the ledger before anything of it becomes visible, and none is computed again:
a run that is resumed begins a segment at the next index, with draws and noise of its own.

`train` goes from settings to a summary, `dry_run` to a plan.
"""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any

import jax
import numpy as np

from fedsim import accounting
from fedsim.accounting import at_most, event_fields
from fedsim.clipping import MANY_PARAMETERS, num_coordinates
from fedsim.config import Algorithm, PrivacyConfig, RunConfig
from fedsim.data import TEMPLATE, corpora
from fedsim.engine import Stats, versions
from fedsim.errors import ConfigError
from fedsim.evaluate import evaluate, headline
from fedsim.files import sha256_of, write_json
from fedsim.plan import claimed_fields, in_words, ledger_head, warnings_of
from fedsim.run import (
    SENDING,
    Console,
    Ledger,
    Metrics,
    Replayed,
    Segment,
    State,
    StoredRun,
    checkpoint,
    claimed_epsilon,
    directory,
    gradient_sha256,
    ledger as run_ledger,
    model_name,
    restored,
    results,
    save,
    time_in_words,
)
from fedsim.signals import ended_by, stop_signals
from fedsim.training.callbacks import LOGGERS, Callback, Calls
from fedsim.training.open import AuditHooks, CustomTask, Purpose, open_run
from fedsim.training.optimizers import (
    Diverged,
    Noise,
    averaged,
    largest_of,
    rate_of,
    update_rule,
    updater,
    with_defaults,
)
from fedsim.training.prepare import PreparedRun, prepare_run
from fedsim.training.private_evaluation import noisy_evaluate

OPERATIONS = 5e10  # a second, of a CPU core; half of what two take in docs/guide/chats.md
MAX_GROWTH = 100.0  # times the largest parameter at the start, or 1: nothing is learnt beyond
STOPPING = (
    "stopping: this step is finished and saved; a second signal ends at once, and loses the steps "
    "since the last checkpoint"
)
NOTHING_PROMISED = (
    "{}, so no privacy guarantee. The privacy budget of these users, in {}, will be infinite for "
    "ever, and no limit can be kept. For trials use a ledger of their own: budget_ledger=PATH"
)


class Trainer:
    """One run, from its first or its next step to its last."""

    def __init__(self, prepared: PreparedRun):
        opened = prepared.opened
        self.plan, self.method, self.engine = prepared.plan, prepared.method, prepared.engine
        self.strategy, self.params = prepared.strategy, prepared.params
        self.booking, self.callbacks = prepared.booking, prepared.callbacks
        self.run, self.data, self.key = opened.run, opened.data, opened.key
        self.console, self.audit = opened.console, opened.audit
        self.replays = opened.purpose == Purpose.REPLAY
        self.passed: dict[int, State | None] = {}
        """States of a replay from which later segments began, by their steps."""
        sigma = self.plan.noise_multiplier
        self.event = self.method.event(sigma) if sigma else None
        self.epsilons = self._epsilons()
        self.clip, self.releases = self.plan.clip, self.plan.releases
        self.ahead = self.event is not None and self.engine.platform != "cpu"
        """The cores here draw noise while workers compute."""
        self.noise = self.plan.add_noise(ahead=self.ahead)
        self.how = {
            "noise_multiplier": self.plan.gradient_noise_multiplier,
            "strategy": self.strategy,
            "add_noise": self.audit.record_noise(self.noise) if self.audit else self.noise,
        }
        """Arguments of each step's `gradient`."""
        kind = self.plan.sampling.kind
        self.line = {
            "event": self.event and event_fields(self.event),
            "sampling_run": kind,
            "sampling_accounted": kind,
        }
        """Fields of each step's line in the ledger."""
        evaluations = self.plan.evaluations
        usual = self.run.evaluated_every(self.plan.num_steps, self.plan.batch_size)
        self.eval_every = evaluations.every if evaluations else usual
        self.evaluation_s = 0.0
        """Seconds of the last evaluation; 0 before the first."""
        self.most_param = MAX_GROWTH * max(1.0, float(largest_of(self.params)))
        self.transformation = update_rule(self.run, rate_of(self.run, self.plan.num_steps))
        self.update = updater(self.transformation, self.params)

    def _epsilons(self) -> dict[int, float]:
        """{number of steps: epsilon after them}, a tenth of the run apart; empty without noise."""
        if self.event is None:
            return {}
        plan, every = self.plan, -(-self.plan.num_steps // 10)
        running = accounting.RunningEpsilon(self.event, plan.delta, plan.before)
        return {
            step: running(step) for step in (*range(every, plan.num_steps, every), plan.num_steps)
        }

    def fit(self) -> dict[str, Any]:
        """Run the remaining steps, write the summary and return it."""
        run_dir, state = self.run.run_dir, self._start()
        settings = sha256_of(run_dir / directory.CONFIG)
        head = ledger_head(self.plan, config_sha256=settings, key_seal=self.key.seal("ledger"))
        kind = Replayed if self.replays else Ledger
        ledger = kind(run_dir, head, least=state.step, least_chain=state.chain)
        with closing(ledger), closing(Metrics(run_dir, ledger.num_steps or -1)) as metrics:
            self.calls = self._calls(settings)
            self.calls.begin(ledger.num_steps)
            if self.plan.evaluations is None and not ledger.num_steps:
                self._evaluate(state, metrics, 0)  # a run that ends meanwhile costs nothing
            # Everything that is there of the run is in order: now it is counted.
            nobody = nullcontext((run_ledger.unnoted, run_ledger.unnoted))
            with self.booking.admitted() if self.booking else nobody as reported:
                ledger.reached, self.evaluated = reported
                if state.step < self.plan.num_steps:  # a summary of fewer steps than released
                    (run_dir / directory.SUMMARY).unlink(missing_ok=True)
                for part in self._segments(state, ledger):
                    state, self.saved, end = part
                    self._steps(state, ledger, metrics, end)
                    if state.step < end:
                        break
                epsilon = claimed_epsilon(run_dir, self.plan)  # recomputed from the ledger
                summary = {
                    **claimed_fields(self.plan, epsilon, ledger.chain),
                    **results(vars(state)),
                    "num_examples": self.data.train.num_examples,
                    "loss_unit": self.data.loss_unit,
                }
                if isinstance(ledger, Replayed):
                    return {**summary, "computed_on": ledger.computed_on}
                write_json(run_dir / directory.SUMMARY, summary, mode=0o600)
        self.calls.end(summary)
        return summary

    def _start(self) -> State:
        """The state of the last checkpoint, or that before the first step."""
        opt_state = self.transformation.init(self.params)
        average = self.params if self.run.ema else None
        state = State(self.params, opt_state, average, clip_norm=self.plan.clip_norm)
        return restored(self.run.run_dir, state)

    def _calls(self, identity: str) -> Calls:
        """The callbacks and loggers of the run."""
        run, loggers = self.run, []
        update = {"optimizer": run.optimizer, "learning_rate": run.learning_rate}
        shown = {**self.plan.as_dict(), **update, "model": model_name(run.model.source)}
        for kind in run.log_to:
            logger = LOGGERS[kind](run.run_dir, identity, shown)
            logger.reads_non_private = kind not in SENDING
            loggers.append(logger)
        return Calls(self.plan, self.callbacks, loggers, self.console.warn)

    def _segments(self, state: State, ledger: Ledger) -> Iterator[tuple[State, int, int]]:
        """(state to go on from, steps of its checkpoint, index of the end) of segments to run."""
        total, segments = self.plan.num_steps, ledger.segments
        lanes = "" if self.event else f"{self.engine.num_lanes} lanes"  # sums of float32
        bits = computed_on(self.engine.facts()["kind"], lanes)
        if isinstance(ledger, Replayed):
            ledger.computed_on = bits
            yield from self._recorded(state, ledger)
        elif not state.step == total == state.evaluated:
            # With a seed, no two histories share a nonce, nor do machines whose bits may differ.
            where = [self.strategy, bits, len(segments), state.step, ledger.released_sha256]
            nonce = self.key.nonce(" ".join(map(str, where)))
            segment = Segment(nonce, state.step, ledger.num_steps, bits)
            if segments:
                self._tell_lost(segment)
            ledger.begin(segment)
            yield self._enter(segment, state, ledger), state.step, total

    def _recorded(self, state: State, ledger: Ledger) -> Iterator[tuple[State, int, int]]:
        """As `_segments`, of a replay, from the checkpoint of `state` on."""
        segments = ledger.segments
        number = max(0, run_ledger.number_of(segments, state.step))
        ends = [*(segment.first for segment in segments[1:]), ledger.num_steps]
        self.passed = dict.fromkeys(segment.after for segment in segments)
        self.passed[state.step] = start = dataclasses.replace(state)
        yield self._enter(segments[number], start, ledger), state.step, ends[number]
        for segment, end in zip(segments[number + 1 :], ends[number + 1 :], strict=True):
            if (start := self.passed[segment.after]) is None:
                expected = f"the checkpoint after step {segment.after}, from which a segment began"
                raise ConfigError(f"{self.run.run_dir}: expected {expected}", field="run")
            yield self._enter(segment, start, ledger), start.step, end

    def _enter(self, segment: Segment, state: State, ledger: Ledger) -> State:
        """Draw by the nonce of a segment from here on. Returns the state, with what was lost."""
        self.method.key = self.key.in_segment(segment.nonce, segment.first)
        lost = max(0, segment.first - state.step)
        step, lost_steps = state.step + lost, state.lost_steps + lost
        chain = ledger.chain_after(step)
        return dataclasses.replace(state, step=step, lost_steps=lost_steps, chain=chain)

    def _tell_lost(self, segment: Segment) -> None:
        """Say from where the run continues, and what that costs."""
        lost, total = segment.first - segment.after, self.plan.num_steps
        text = f"resuming after step {segment.after}: {lost} steps are paid for, but lost; "
        self.console.note(f"{text}{total - segment.first} of {total} are left")

    def _steps(self, state: State, ledger: Ledger, metrics: Metrics, end: int) -> None:
        """Run the steps up to `end`, or as many as there is time for before a stop signal."""
        # A signal ends what comes before the steps, also in a compilation.
        self._evaluate(state, metrics, self.saved)
        self._evaluate(state, metrics, state.step)  # of a run whose last steps are lost
        with (
            stop_signals(lambda: self.console.note(STOPPING)) as stop,
            ThreadPoolExecutor(1) as threads,
            checkpoint.Saver(functools.partial(save, self.run.run_dir), self.saved) as saver,
            self.console.steps(state.step, self.plan.num_steps) as show,
        ):
            rows = threads.submit(self.method.draw, state.step)
            while state.step < end and not (stop.is_set() or self.calls.stopped):
                drawn = rows.result()
                if self.ahead:
                    sizes = tuple(leaf.size for leaf in jax.tree.leaves(state.params))
                    of = (state.step, self.method.key, self.plan.stddev)
                    self.noise.begin(threads, *of, sizes)
                rows = threads.submit(self.method.draw, state.step + 1)
                values = self._step(state, ledger, drawn)
                metrics.log(state.step, values)
                self.calls.step(state.step, {**values, "eval/loss": state.eval_loss})
                with ended_by(stop):  # a resumed run makes the evaluation
                    self._evaluate(state, metrics, state.step)
                if state.evaluated == state.step:
                    values["eval/loss"] = state.eval_loss
                show(state.step, values, self.evaluation_s * self._evaluations_after(state.step))
                if saver.due(state.step, self.run.checkpoint_every):
                    saver.save(state.step, vars(state))
                if state.step in self.passed:
                    self.passed[state.step] = dataclasses.replace(state)
            saver.save(state.step, vars(state))
        if state.step < end:
            then = "; resume to continue from there" if self.audit is None else ""
            self.console.note(f"stopped after step {state.step}{then}")

    def _evaluate(self, state: State, metrics: Metrics, step: int) -> None:
        """Evaluate the parameters as those of `step`, if that is due and has not been done."""
        due = step % self.eval_every == 0 or step == self.plan.num_steps
        if self.replays or not due or state.evaluated == step:
            return
        if step == 0:
            self.console.note("evaluating; then the first step, which compiles")
        began = time.monotonic()
        with self.console.phase(f"evaluation after step {step}") as at:
            model = (self.engine, state.released, self.data)
            if (how := self.plan.evaluations) is not None:
                place = (step, self.run.run_dir, self.evaluated)
                again = step == self.saved
                values = noisy_evaluate(*model, how, self.method.key, *place, again=again)
            else:
                values = evaluate(*model, self.run.eval_examples, at=at)
        if values is None:  # it was released for parameters that a crash lost
            return
        self.evaluation_s = time.monotonic() - began
        metrics.log(step, values)
        self.calls.evaluated(step, values)
        state.eval_loss, state.evaluated = headline(values), step
        if step == 0:
            state.initial_eval_loss = state.eval_loss
            self.console.evaluated(values)

    def _evaluations_after(self, step: int) -> int:
        """Number of evaluations that are due after a step."""
        return -(-self.plan.num_steps // self.eval_every) - step // self.eval_every

    def _step(self, state: State, ledger: Ledger, rows: np.ndarray) -> dict[str, float]:
        """Run one step: gradient, ledger, update. Returns its metrics."""
        started, step = time.monotonic(), state.step + 1
        clip = dataclasses.replace(self.clip, norm=state.clip_norm)
        noisy, stats = self.method.gradient(
            state.params, state.step, self.engine, clip=clip, rows=rows, **self.how
        )
        values = self._private_values(stats, state.clip_norm)
        beside = {"clip_norm": state.clip_norm}
        for extra in self.releases:
            rng = self.method.key.fresh.generator(extra.purpose, state.step)
            beside |= extra.release(beside["clip_norm"], stats, rng)
        if self.plan.clip_quantile is not None:
            values["privacy/clip_norm"] = state.clip_norm
        epsilon = self.epsilons.get(step)
        ledger.record(
            state.step,
            **self.line,
            epsilon=epsilon,
            gradient_sha256=gradient_sha256((noisy.numbers, *map(np.float64, beside.values()))),
        )
        # It is released; from here on it may be seen.
        state.clip_norm = beside["clip_norm"]
        values |= {"privacy/loss": beside["loss"]} if "loss" in beside else {}
        grad = noisy.values()
        if self.audit is not None:
            noise, unit = self.plan.strategy, clip.sensitivity / self.plan.expected_count
            self.audit.on_release(grad, unit, noise and noise.coefficients)
        state.params, state.opt_state = self.update(grad, state.opt_state, state.params)
        largest = float(largest_of(state.params))
        if not largest <= self.most_param:  # also for nan
            epsilon = claimed_epsilon(self.run.run_dir, self.plan) + self.plan.slack.epsilon
            rate = f"learning_rate={self.run.learning_rate:g}: expected a smaller one"
            found = f"the largest parameter is {largest:g} after step {step}"
            raise Diverged(f"{rate}: {found}; epsilon {at_most(epsilon, '.4f')} is spent")
        state.step, state.chain = step, ledger.chain_after(step)
        if self.run.ema:
            state.average = averaged(state.average, state.params, self.run.ema, step)
        state.gradients_computed += int(stats.num_rows.sum())
        seconds = time.monotonic() - started
        state.wall_seconds += seconds
        return {
            **({} if epsilon is None else {"privacy/epsilon": epsilon}),
            "performance/step_seconds": seconds,
            **values,
        }

    def _private_values(self, stats: Stats, clip_norm: float) -> dict[str, float]:
        """Metrics of a step computed from private data without noise."""
        values = {
            "cohort_size": len(stats.norms),
            "gradients": int(stats.num_rows.sum()),
            "dropped_units": int(stats.dropped.sum()),
        }
        kept = ~stats.dropped & (stats.num_rows > 0)
        if kept.any():
            norms = stats.norms[kept]
            values |= {
                "loss": float(stats.losses[kept].mean()),
                "norm_median": float(np.median(norms)),
                "clip_fraction": float((norms > clip_norm).mean()),
            }
        return {f"non_private/{name}": value for name, value in values.items()}


def computed_on(host: str, lanes: str) -> str:
    """Kind of host, and a digest of all else on which bits depend: equal where bits can be."""
    facts = json.dumps([lanes, versions()], sort_keys=True)
    return f"{host}, packages {hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def train(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    console: Console,
    *,
    purpose: Purpose = Purpose.TRAIN,
    custom: CustomTask | None = None,
    audit: AuditHooks | None = None,
    callbacks: Sequence[Callback] = (),
    kind: type | None = None,
) -> dict[str, Any]:
    """Train, or resume training; return the contents of `summary.json`.

    Nothing is written to the run directory before all checks have passed.
    Args:
      custom: data and task, instead of those that the settings name.
      audit: canaries of an audit.
      callbacks: called between the steps.
      kind: a subclass in the place of the algorithm's own class.
    Raises:
      ConfigError: the settings do not fit the data, the model or each other.
      EngineError: workers failed.
      LedgerError: a ledger is damaged or locked.
    """
    expect_runnable(privacy, run)
    if not purpose.is_counted:  # nobody else may learn how many trials there are
        here = [name for name in run.log_to if name not in SENDING]
        run = dataclasses.replace(run, log_to=here)
    hooks: dict[str, Any] = {"custom": custom, "audit": audit, "kind": kind}
    with open_run(algorithm, privacy, run, console, purpose=purpose, **hooks) as opened:
        prepared = prepare_run(opened, callbacks=callbacks)
        show(prepared)
        return launch(prepared).fit()


def launch(prepared: PreparedRun) -> Trainer:
    """Write the run's directory if it is new, lock it, and return the Trainer of the run."""
    opened, plan = prepared.opened, prepared.plan
    if opened.stored is None:
        given = (opened.identity, opened.settings, opened.run, prepared.task.describe())
        stored = StoredRun(*given, versions=versions(), plan=plan, strategy=str(prepared.strategy))
        template = opened.data.path and opened.data.path / TEMPLATE
        template = template if template and template.is_file() else None
        files = (opened.data.tokenizer_path, opened.model and opened.model.files, template)
        created = directory.create(opened.run.run_dir, stored, opened.key, *files)
        opened.until_end.enter_context(created)
    return Trainer(prepared)


def show(prepared: PreparedRun, *, dry_run: bool = False) -> None:
    """Show the plan and what it warns of, before the first step; of a dry run without workers."""
    opened, plan, console = prepared.opened, prepared.plan, prepared.opened.console
    if opened.stored is None:
        source = opened.run.data.source  # who built it has been told already
        told = source == corpora.PYDOCS or corpora.is_built(source)
        lost = [] if told else opened.data.lost()
        for warning in [*lost, *warnings_of(plan)]:
            console.warn(warning)
        if prepared.booking is not None:
            request, _ = prepared.booking.requests[0]
            if not plan.guarantee:
                console.warn(NOTHING_PROMISED.format(in_words(plan.reasons), request.place))
            if alike := request.lookalike_warning():
                console.warn(alike)
    console.plan(plan, None if dry_run else prepared.engine, opened.run)
    how, kernels = prepared.strategy, prepared.engine.facts()["kernels"]
    rows = [("gradient method", f"{how.name}, {how.rows} rows in a pass{kernels}")]
    if (length := getattr(opened.data.train, "max_length", None)) is not None:
        size = num_coordinates((prepared.params, prepared.task.frozen))
        rows.append(("rows", f"up to {length:,} tokens, through {size:,} parameters"))
        if prepared.engine.platform == "cpu" and size >= MANY_PARAMETERS:
            passes = 2 if prepared.task.frozen is not None else 3  # forward, and backward
            operations = 2 * passes * size * length * plan.batch_size * plan.num_steps
            time = time_in_words(operations / OPERATIONS)
            rows.append(
                ("time", f"{time} of one CPU core if all rows are full; evaluations add to it")
            )
    if opened.purpose.is_counted and not dry_run:
        rows.append(("directory", str(opened.run.run_dir)))
    console.rows(rows)


def dry_run(
    algorithm: Algorithm, privacy: PrivacyConfig, run: RunConfig, console: Console
) -> dict[str, Any]:
    """Plan a run, with the engine `local`; nothing is trained, written or paid for. Returns the
    plan. Raises: ConfigError, EngineError: as in a training."""
    expect_runnable(privacy, run)
    with open_run(algorithm, privacy, run, console) as opened:
        prepared = prepare_run(opened, dry_run=True)
        show(prepared, dry_run=True)
        return prepared.plan.as_dict()


def expect_runnable(privacy: PrivacyConfig, run: RunConfig) -> None:
    """Raise ConfigError if the optimizer does not exist."""
    settled = with_defaults(run, Noise(1.0, 1.0, 1))
    update_rule(settled, rate_of(settled, privacy.num_steps))
