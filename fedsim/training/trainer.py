"""The training loop: gradient, ledger, update, evaluation and checkpoint of each step.

A step is written into the ledger before anything of it becomes visible, and none is computed again:
a run that is resumed begins a segment at the next index, with draws and noise of its own.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.accounting import at_most
from fedsim.config import to_json
from fedsim.engine import Stats, versions
from fedsim.errors import ConfigError
from fedsim.evaluate import VALIDATION, evaluate, headline
from fedsim.files import write_json
from fedsim.plan import claimed_fields, ledger_head
from fedsim.run import (
    EVALUATED,
    SENDING,
    Ledger,
    Metrics,
    Replayed,
    Segment,
    State,
    checkpoint,
    claimed_epsilon,
    directory,
    gradient_sha256,
    ledger as run_ledger,
    model_name,
    restored,
    results,
    save,
)
from fedsim.signals import stop_signals
from fedsim.training.callbacks import Calls
from fedsim.training.loggers import LOGGERS
from fedsim.training.open import Purpose, phase_of
from fedsim.training.optimizers import (
    Diverged,
    averaged,
    largest_of,
    rate_of,
    update_rule,
    updater,
)
from fedsim.training.prepare import PreparedRun
from fedsim.training.private_evaluation import Reported, noisy_evaluate

MAX_LOSS = 1000.0  # times the first one, or nats: nothing comes of a training beyond
MAX_GROWTH = 100.0  # times the largest parameter at the start, or 1; likewise


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
        self.replayed: dict[int, State] = {}
        """States from which later segments of a replay go on, by their steps."""
        self.written: deque[int] = deque()
        self.told_dropped = False
        sigma = self.plan.noise_multiplier
        self.event = self.method.event(sigma) if sigma else None
        if self.event is not None:
            self.running_epsilon = accounting.RunningEpsilon(
                self.event, self.plan.delta, self.plan.before
            )
        add_noise = self.plan.add_noise()
        self.add_noise = self.audit.record_noise(add_noise) if self.audit else add_noise
        evaluations = self.plan.evaluations
        every = evaluations.every if evaluations else self.run.eval_every
        self.eval_every = every or max(1, self.plan.num_steps // 10)
        self.most_param = MAX_GROWTH * max(1.0, float(largest_of(self.params)))
        self.transformation = update_rule(self.run, rate_of(self.run, self.plan.num_steps))
        self.update = updater(self.transformation)

    def fit(self) -> dict[str, Any]:
        """Run the remaining steps, write the summary and return it."""
        state = State(
            self.params,
            self.transformation.init(self.params),
            average=self.params if self.run.ema else None,
            clip_norm=self.plan.clip_norm,
        )
        state = restored(self.run.run_dir, state)
        settings = directory.config_sha256(self.run.run_dir)
        seal = self.key.seal("ledger")
        first = ledger_head(self.plan, config_sha256=settings, key_seal=seal)
        kind = Replayed if self.replays else Ledger
        ledger = kind(self.run.run_dir, first, least=state.step, least_chain=state.chain)
        last_step = ledger.num_steps or -1
        with (
            closing(ledger),
            closing(Metrics(self.run.run_dir, last_step)) as metrics,
        ):
            self.calls = self._calls(settings)
            self.calls.begin(ledger.num_steps)
            # Everything that is there of the run is in order: now it is counted.
            with self.booking.admitted() if self.booking else nullcontext(Reported()) as reported:
                ledger.reached, self.evaluated = reported
                if state.step < self.plan.num_steps:  # a summary of fewer steps than released
                    (self.run.run_dir / directory.SUMMARY).unlink(missing_ok=True)
                for part in self._segments(state, ledger):
                    state, self.saved, end = part
                    self._steps(state, ledger, metrics, end)
                    if state.step < end:
                        break
                summary = self._summary(state, ledger.chain)
                if isinstance(ledger, Replayed):
                    return {**summary, "computed_on": ledger.computed_on}
                write_json(self.run.run_dir / directory.SUMMARY, summary, mode=0o600)
        self.calls.end(summary)
        return summary

    def _calls(self, identity: str) -> Calls:
        """The callbacks and loggers of the run."""
        run, loggers = self.run, []
        update = {"optimizer": run.optimizer, "learning_rate": run.learning_rate}
        shown = {**self.plan.as_dict(), **update, "model": model_name(run.model.source)}
        for kind in run.log_to:
            logger = LOGGERS[kind](run.run_dir, identity, shown)
            logger.reads_non_private = run.log_non_private or kind not in SENDING
            loggers.append(logger)
        return Calls(self.plan, self.callbacks, loggers, self.console.warn)

    def _segments(self, state: State, ledger: Ledger) -> Iterator[tuple[State, int, int]]:
        """(state to go on from, steps of its checkpoint, index of the end) of the segments to run:
        a new one, or those of a replay. Nothing is left of a run that has ended."""
        total, saved = self.plan.num_steps, state.step
        lanes = "" if self.event else f"{self.run.engine.num_lanes} lanes"  # sums of float32
        bits = computed_on(self.engine.facts()["kind"], lanes)
        if isinstance(ledger, Replayed):
            ledger.computed_on = bits
            yield from self._recorded(state, ledger)
        elif saved == total == state.evaluated:
            yield state, saved, total
        else:
            # With a seed, no two histories share a nonce, nor do machines whose bits may differ.
            where = [self.strategy, bits, len(ledger.segments), saved, ledger.released_sha256]
            nonce = self.key.nonce(" ".join(map(str, where)))
            segment = Segment(nonce, saved, ledger.num_steps, bits)
            if ledger.segments:
                self._tell_lost(segment)
            ledger.begin(segment)
            yield self._enter(segment, state, ledger), saved, total

    def _recorded(self, state: State, ledger: Ledger) -> Iterator[tuple[State, int, int]]:
        """As `_segments`, of a replay, from the checkpoint of `state` on."""
        segments = ledger.segments
        number = max(0, run_ledger.number_of(segments, state.step))
        ends = [*(segment.first for segment in segments[1:]), ledger.num_steps]
        self.replayed = {state.step: dataclasses.replace(state)}
        self.keep = {segment.after for segment in segments}
        self.method.key = self.key.in_segment(segments[number].nonce, segments[number].first)
        yield state, state.step, ends[number]
        for segment, end in zip(segments[number + 1 :], ends[number + 1 :], strict=True):
            if segment.after not in self.replayed:
                expected = f"the checkpoint after step {segment.after}, from which a segment began"
                raise ConfigError(f"{self.run.run_dir}: expected {expected}", field="run")
            state = self._enter(segment, self.replayed[segment.after], ledger)
            self.replayed[state.step] = dataclasses.replace(state)
            yield state, segment.after, end

    def _enter(self, segment: Segment, state: State, ledger: Ledger) -> State:
        """Draw by the nonce of a segment from here on. Returns the state, with what was lost."""
        self.method.key = self.key.in_segment(segment.nonce, segment.first)
        return dataclasses.replace(
            state,
            step=segment.first,
            lost_steps=state.lost_steps + segment.first - segment.after,
            chain=ledger.chain_after(segment.first),
        )

    def _tell_lost(self, segment: Segment) -> None:
        """Say from where the run goes on, and what that costs."""
        text = f"resuming after step {segment.after}"
        if lost := segment.first - segment.after:
            steps = f"the {lost} steps after it" if lost > 1 else "the step after it"
            text += (
                f": {steps} had no checkpoint and cannot be used; they are paid for, and "
                f"{self.plan.num_steps - segment.first} of {self.plan.num_steps} are left"
            )
        self.console.note(text)

    def _steps(self, state: State, ledger: Ledger, metrics: Metrics, end: int) -> None:
        """Run the steps up to `end`, or as many as there is time for before a stop signal.

        A step is evaluated after the next one, and saved then.
        """
        with (
            stop_signals() as stop,
            ThreadPoolExecutor(2) as threads,
            checkpoint.Saver(self._write, self.saved) as saver,
            self.console.steps(state.step, self.plan.num_steps) as show,
        ):
            pending = self._evaluates(self.saved) and state.evaluated != self.saved
            loaded = self.saved if pending else state.step
            finish = self._after(state, metrics, saver, loaded)
            rows = threads.submit(self.method.draw, state.step)
            first = state.step
            while state.step < end and not (stop.is_set() or self.calls.stopped):
                drawn, rows = rows.result(), threads.submit(self.method.draw, state.step + 1)
                phase = phase_of(self.engine, self.console, "first step")
                with phase if state.step == first else nullcontext():
                    values = self._step(state, ledger, threads, drawn)
                finish()
                metrics.log(state.step, values)
                shown = {**values, "eval/loss": state.eval_loss}
                self._tell_saved()
                self.calls.step(state.step, shown)
                self._tell_dropped(state.step, values)
                if self.audit is not None:  # canaries have a loss of any size
                    shown.pop("non_private/loss", None)  # a step of nobody has none
                show(state.step, {**shown, EVALUATED: state.evaluated})
                finish = self._after(state, metrics, saver, state.step)
                if self.replays and state.step in self.keep:
                    self.replayed[state.step] = dataclasses.replace(state)
            if state.step == self.plan.num_steps:
                finish()
            saver.save(state.step, vars(state))
        self._tell_saved()
        if state.step < end:
            then = "; resume=true continues from there" if self.audit is None else ""
            self.console.note(f"stopped after step {state.step}{then}")

    def _evaluates(self, step: int) -> bool:
        """True if the state after `step` is evaluated."""
        return not self.replays and (step == 0 or self._due(step, self.eval_every))

    def _after(
        self, state: State, metrics: Metrics, saver: checkpoint.Saver, step: int
    ) -> Callable[[], None]:
        """Start the checkpoint due after a step; the result first evaluates the step, if due.

        Args: step: the step that gave the parameters.
        """
        if not self._evaluates(step) or state.evaluated == step:
            self._save(state, saver)
            return lambda: None
        params, then = state.released, dataclasses.replace(state)

        def losses() -> dict[str, float] | None:
            if (how := self.plan.evaluations) is not None:
                return noisy_evaluate(
                    self.engine,
                    params,
                    self.data,
                    how,
                    self.method.key,
                    step,
                    self.run.run_dir,
                    self.evaluated,
                    again=step == self.saved,
                )
            return evaluate(self.engine, params, self.data, self.run.eval_examples)

        def finish() -> None:
            with phase_of(self.engine, self.console, f"evaluation after step {step}"):
                values = losses()
            if values is None:  # it was released for parameters that a crash lost
                return self._save(then, saver)
            metrics.log(step, values)
            self.calls.evaluated(step, values)
            most = MAX_LOSS * max(1.0, state.initial_eval_loss) if step else math.inf
            # When a run ends is public, so a loss without noise may not end one with a guarantee.
            # One with noise says nothing of it: it is cut off at its bound, and the rest is noise.
            judged = not self.plan.noise_multiplier
            loss = values.get(VALIDATION["eval_users"], 0.0) if judged else 0.0
            if not loss <= most:  # also for nan
                raise self._diverged(step, f"the loss is {loss:g}")
            for copy in (state, then):
                copy.eval_loss, copy.evaluated = headline(values), step
                if step == 0:
                    copy.initial_eval_loss = copy.eval_loss
            self._save(then, saver)

        return finish

    def _step(
        self, state: State, ledger: Ledger, thread: ThreadPoolExecutor, rows: np.ndarray
    ) -> dict[str, float]:
        """Run one step: gradient, ledger, update. Returns its metrics."""
        started, step = time.monotonic(), state.step + 1
        accounted = thread.submit(self._epsilon_so_far, step)  # while workers compute
        clip = self.plan.clip_at(state.clip_norm)
        noisy, stats = self.method.gradient(
            state.params,
            state.step,
            self.engine,
            clip=clip,
            noise_multiplier=self.plan.gradient_noise_multiplier,
            strategy=self.strategy,
            add_noise=self.add_noise,
            rows=rows,
        )
        values = self._private_values(stats, state.clip_norm)
        beside = {"clip_norm": state.clip_norm}
        for extra in self.plan.releases:
            rng = self.method.key.fresh.generator(extra.purpose, state.step)
            beside |= extra.release(beside["clip_norm"], stats, rng)
        if self.plan.adaptive is not None:
            values["privacy/clip_norm"] = state.clip_norm
        epsilon = accounted.result()
        ledger.record(
            state.step,
            self.event,
            sampling_run=self.plan.sampling.kind,
            sampling_accounted=self.plan.sampling.accounted,
            epsilon=to_json(epsilon),
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
            raise self._diverged(step, f"the largest parameter is {largest:g}")
        state.step, state.chain = step, ledger.chain_after(step)
        if self.run.ema:
            state.average = averaged(state.average, state.params, self.run.ema, step)
        state.gradients_computed += int(stats.num_rows.sum())
        seconds = time.monotonic() - started
        state.wall_seconds += seconds
        return {
            **({} if epsilon is None else {"privacy/epsilon": epsilon}),
            "performance/step_seconds": seconds,
            "non_private/gradients_per_second": int(stats.num_rows.sum()) / seconds,
            "non_private/units_per_second": len(stats.norms) / seconds,
            **values,
        }

    def _diverged(self, step: int, what: str) -> Diverged:
        """The error of a diverged run, whose reason is released already."""
        epsilon = claimed_epsilon(self.run.run_dir, self.plan)
        spent = (
            f"epsilon {at_most(epsilon + self.plan.slack.epsilon, '.4f')} is spent"
            if math.isfinite(epsilon)
            else "no privacy is left"
        )
        rate = f"learning_rate={self.run.learning_rate:g}: expected a smaller one"
        return Diverged(f"{rate}: {what} after step {step}; {spent}")

    def _due(self, step: int, interval: int) -> bool:
        """True if an action of every `interval` steps, and of the last, is due after `step`."""
        return step % interval == 0 or step == self.plan.num_steps

    def _save(self, state: State, saver: checkpoint.Saver) -> None:
        last = state.step == self.plan.num_steps
        if state.step and (last or saver.due(state.step, self.run.checkpoint_every)):
            saver.save(state.step, vars(state))

    def _write(self, step: int, state: dict[str, Any]) -> None:
        save(self.run.run_dir, step, state)
        self.written.append(step)

    def _tell_saved(self) -> None:
        """Call the callbacks for the checkpoints that another thread has written."""
        while self.written:
            step = self.written.popleft()
            self.calls.saved(step, checkpoint.path_of(self.run.run_dir, step))

    def _tell_dropped(self, step: int, values: dict[str, float]) -> None:
        """Show once that nobody in a step had a finite gradient; where losses are not shown, as in
        a trial, this is not."""
        dropped = values["non_private/dropped_units"]
        if self.told_dropped or not 0 < dropped == values["non_private/cohort_size"]:
            return
        self.told_dropped = True
        self.console.note(
            f"warning: no unit of step {step} had a finite gradient, so all {dropped:g} were "
            "dropped and the step was noise alone; later ones are counted in "
            "non_private/dropped_units, which has no noise: not to be published"
        )

    def _private_values(self, stats: Stats, clip_norm: float) -> dict[str, float]:
        """Metrics of a step computed from private data without noise."""
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
        """Epsilon after num_steps steps, at each reporting interval; None in between."""
        if self.event is None:
            return math.inf
        return self.running_epsilon(num_steps) if self._due(num_steps, self.run.log_every) else None

    def _summary(self, state: State, chain: str) -> dict[str, Any]:
        """Contents of `summary.json`; epsilon is recomputed from the ledger."""
        epsilon = claimed_epsilon(self.run.run_dir, self.plan)
        return {
            **claimed_fields(self.plan, epsilon, chain),
            **results(vars(state)),
            "num_examples": self.data.train.num_examples,
            "loss_unit": self.data.loss_unit,
        }


def computed_on(host: str, lanes: str) -> str:
    """Kind of host, and a digest of all else on which bits depend: equal where bits can be."""
    facts = json.dumps([lanes, versions()], sort_keys=True)
    return f"{host}, packages {hashlib.sha256(facts.encode()).hexdigest()[:16]}"
