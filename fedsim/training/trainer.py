"""The training loop: gradient, ledger, update, evaluation and checkpoint of each step.

A step is written into the ledger before anything of it becomes visible, and a step that is repeated
after a crash is the same step: same units, same noise, same parameters.
"""

import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from typing import Any

import numpy as np

from fedsim import accounting
from fedsim.accounting import at_most
from fedsim.config import as_dict, to_json
from fedsim.engine import Stats, versions
from fedsim.errors import ConfigError
from fedsim.evaluate import VALIDATION, begin_evaluate, headline
from fedsim.files import write_json
from fedsim.noise import Correlated
from fedsim.plan import claimed_fields, ledger_head
from fedsim.run import (
    EVALUATED,
    Ledger,
    Metrics,
    OtherBits,
    State,
    StoredRun,
    checkpoint,
    claimed_epsilon,
    directory,
    gradient_sha256,
    model_name,
    released,
    restored,
    results,
    save,
)
from fedsim.signals import stop_signals
from fedsim.training.callbacks import Calls
from fedsim.training.loggers import LoggedRun, open_loggers
from fedsim.training.open import Purpose, phase_of
from fedsim.training.optimizers import (
    Diverged,
    averaged,
    diverged,
    largest_of,
    update_of,
    updater,
)
from fedsim.training.prepare import PreparedRun
from fedsim.training.private_evaluation import begin_noisy_evaluate

MAX_LOSS = 1000.0  # times the first one, or nats: nothing comes of a training beyond
MAX_GROWTH = 100.0  # times the largest parameter at the start, or 1; likewise


class Trainer:
    """One run, from its first or its next step to its last."""

    def __init__(self, prepared: PreparedRun, stored: StoredRun):
        """Args: stored: the run as it was started."""
        opened = prepared.opened
        self.plan, self.method, self.engine = prepared.plan, prepared.method, prepared.engine
        self.strategy, self.params = prepared.strategy, prepared.params
        self.booking, self.calls = prepared.booking, Calls(prepared.callbacks, prepared.plan)
        self.run, self.data, self.key = opened.run, opened.data, opened.key
        self.console, self.audit = opened.console, opened.audit
        self.resumed, self.replays = opened.stored is not None, opened.purpose == Purpose.REPLAY
        self.host = self.engine.facts()["kind"]
        self.first_host = stored.host or self.host
        # A repeated step may have other bits in this process, or had in one before.
        self.elsewhere = directory.other_bits(stored, versions(), self.host)
        self.other_bits = self.elsewhere or released.elsewhere(self.run.run_dir)
        self.written: deque[int] = deque()
        self.told_dropped = False
        sigma = self.plan.noise_multiplier
        self.event = self.method.event(sigma) if sigma else None
        if self.event is not None:
            self.running_epsilon = accounting.RunningEpsilon(
                self.event, self.plan.delta, self.plan.before
            )
        self.own_noise = add_noise = self.plan.add_noise()
        self.noise_row: dict[str, str] = {}
        self.add_noise = self.audit.record_noise(add_noise) if self.audit else add_noise
        evaluations = self.plan.evaluations
        every = evaluations.every if evaluations else self.run.eval_every
        self.eval_every = every or max(1, self.plan.num_steps // 10)
        self.most_param = MAX_GROWTH * max(1.0, float(largest_of(self.params)))
        self.transformation = update_of(self.run, self.plan.num_steps)
        self.update = updater(self.transformation)

    def fit(self) -> dict[str, Any]:
        """Run the remaining steps, write the summary and return it."""
        state = State(
            self.params,
            self.transformation.init(self.params),
            average=self.params if self.run.ema else None,
            clip_norm=self.plan.clip_norm,
        )
        if self.resumed and self.other_bits:
            self.console.warn(
                f"a step that is run again may have other bits: {self.other_bits}: then what it "
                "released is taken as it was kept, or left out"
            )
        state = restored(self.run.run_dir, state, self.console)
        settings = directory.config_sha256(self.run.run_dir)
        seal = self.key.seal("ledger")
        first = ledger_head(self.plan, config_sha256=settings, key_seal=seal)
        ledger = Ledger(self.run.run_dir, first, least=state.step, least_chain=state.chain)
        if isinstance(self.own_noise, Correlated):
            self.own_noise.drawn = functools.partial(self._row_drawn, ledger)
        last_step = state.step or -1
        with (
            closing(ledger),
            closing(Metrics(self.run.run_dir, last_step)) as metrics,
            open_loggers(self.run, self._logged(last_step, settings), self.console.warn) as loggers,
        ):
            self.calls.add(loggers)
            self.calls.begin(state.step)
            # Everything that is there of the run is in order: now it is counted.
            with self.booking.admitted() if self.booking else nullcontext():
                if state.step < self.plan.num_steps:  # a summary of fewer steps than released
                    (self.run.run_dir / directory.SUMMARY).unlink(missing_ok=True)
                self._steps(state, ledger, metrics)
                summary = self._summary(state, ledger.chain)
                write_json(self.run.run_dir / directory.SUMMARY, summary, mode=0o600)
        self.calls.end(summary)
        return summary

    def _logged(self, last_step: int, identity: str) -> LoggedRun:
        """The run as loggers show it, after `last_step`."""
        run, model = as_dict(self.run), model_name(self.run.model.source)
        settings = {name: run[name] for name in ("optimizer", "learning_rate")} | {"model": model}
        settings = self.plan.as_dict() | settings
        return LoggedRun(self.run.run_dir, identity, last_step, settings)

    def _steps(self, state: State, ledger: Ledger, metrics: Metrics) -> None:
        """Run the remaining steps, or as many as there is time for before a stop signal.

        Evaluation and checkpoint of a step start after it and finish during the next one.
        """
        self.released_before = ledger.num_steps  # by other processes, perhaps elsewhere
        with (
            stop_signals() as stop,
            ThreadPoolExecutor(2) as threads,
            checkpoint.Saver(self._write, state.step) as saver,
            self.console.steps(state.step, self.plan.num_steps) as show,
        ):
            finish = self._after(state, metrics, saver, later=True)
            rows = threads.submit(self.method.draw, state.step)
            first = state.step
            while state.step < self.plan.num_steps and not (stop.is_set() or self.calls.stopped):
                if state.step == first:  # hence a checkpoint will have it
                    state.resumed_elsewhere += bool(self.resumed and self.other_bits)
                    if self.resumed and self.elsewhere:
                        released.note_elsewhere(self.run.run_dir, self.other_bits)
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
                finish = self._after(state, metrics, saver)
            if state.step == self.plan.num_steps:
                finish()
            saver.save(state.step, vars(state))
        self._tell_saved()
        if state.step < self.plan.num_steps:
            then = "; --resume continues from there" if self.audit is None else ""
            self.console.note(f"stopped after step {state.step}{then}")

    def _after(
        self, state: State, metrics: Metrics, saver: checkpoint.Saver, *, later: bool = False
    ) -> Callable[[], None]:
        """Start the evaluation and checkpoint due after a step; the result finishes them.

        Args: later: start when the result is called, so that workers begin with the next step.
        """
        step, due = state.step, self._due(state.step, self.eval_every) or state.step == 0
        if not due or state.evaluated == step:
            self._save(state, saver)
            return lambda: None
        params = state.released

        def begin() -> Callable[[], dict[str, float]]:
            if (how := self.plan.evaluations) is not None:
                return begin_noisy_evaluate(
                    self.engine, params, self.data, how, self.method.key, step, self.run.run_dir
                )
            return begin_evaluate(self.engine, params, self.data, self.run.eval_examples)

        losses, then = None if later else begin(), dataclasses.replace(state)

        def finish() -> None:
            with phase_of(self.engine, self.console, f"evaluation after step {step}"):
                values = (losses or begin())()
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
        what = released.Step(noisy, state.clip_norm)
        for extra in self.plan.releases:
            rng = self.method.key.generator(extra.purpose, state.step)
            what = what._replace(**extra.release(what.clip_norm, stats, rng))
        if self.plan.adaptive is not None:
            values["privacy/clip_norm"] = state.clip_norm
        epsilon = accounted.result()
        if (release := self._release(ledger, state.step, what, epsilon)) is not None:
            state.clip_norm = release.clip_norm
            values |= {} if release.loss is None else {"privacy/loss": release.loss}
            grad = release.noisy.values()
            if self.audit is not None:
                noise, unit = self.plan.strategy, clip.sensitivity / self.plan.expected_count
                self.audit.on_release(grad, unit, noise and noise.coefficients)
            state.params, state.opt_state = self.update(grad, state.opt_state, state.params)
            largest = float(largest_of(state.params))
            if not largest <= self.most_param:  # also for nan
                raise self._diverged(step, f"the largest parameter is {largest:g}")
        else:
            state.lost_steps += 1
        state.step, state.chain = step, ledger.chain_after(step)
        if self.run.ema:
            state.average = averaged(state.average, state.params, self.run.ema, step)
        state.gradients_computed += int(stats.num_rows.sum())
        seconds = time.monotonic() - started
        state.wall_seconds += seconds
        return {
            **({} if epsilon is None else {"privacy/epsilon": epsilon}),
            "performance/step_seconds": seconds,
            **self.engine.measurements(),
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
        return diverged(self.run, step, what, f"; {spent}")

    def _release(
        self,
        ledger: Ledger,
        step: int,
        what: released.Step,
        epsilon: float | None,
    ) -> released.Step | None:
        """Write a step to disk and ledger, and return what it releases.

        Guarantees: a step with noise releases once. A repeated step releases what it released
          before: the same bits, or, where bits may be others, the copy that was kept of them, or
          nothing (None); it is paid for in any case.
        Raises: OtherBits: the bits differ where they could be the same.
        """
        run_dir, noise = self.run.run_dir, self.plan.noise_multiplier
        again = step < ledger.num_steps and bool(noise and self.other_bits) and not self.replays
        if step == ledger.num_steps and noise:
            released.keep(run_dir, step, what)
        # Where bits may be others they are not compared: under the same noise they are the same
        # where the sums are, so that a step that is left out would tell of its sum.
        sha256 = str(ledger.digest(step)) if again else released.digest(what)
        try:
            ledger.record(
                step,
                self.event,
                sampling_run=self.plan.sampling.kind,
                sampling_accounted=self.plan.sampling.accounted,
                epsilon=to_json(epsilon),
                gradient_sha256=sha256,
                **self.noise_row,
            )
        except OtherBits:
            if not self.other_bits or (noise and not self.replays):
                raise
            again = bool(noise)
        if not again:  # two gradients without noise give no noise away
            return what
        before = released.kept(run_dir, step, what.noisy, sha256)
        outcome = "what it released is taken, as it was kept" if before else "is left out"
        why = f"was released before, and bits may be others here ({self.other_bits})"
        self.console.warn(f"step {step} {why}: {outcome}")
        return before

    def _row_drawn(self, ledger: Ledger, step: int, row: list[np.ndarray]) -> None:
        """Seal a row of correlated noise for the ledger; compare it with that of a released step.

        Raises:
          OtherBits: it differs, so that later steps would subtract noise that was never added.
          ConfigError: it differs because of other packages or another kind of host.
        """
        seal = self.key.seal(f"noise row {step} {gradient_sha256(row)}")
        self.noise_row = {"noise_row": seal}
        if step >= ledger.num_steps or ledger.noise_row(step) in (None, seal):
            return
        again = f"step={step}: expected the row of noise that was drawn before: resume with the "
        again += "packages, and on the kind of host, that the run was started with"
        if self.other_bits:
            raise ConfigError(f"{again} ({self.other_bits})", field="step")
        raise OtherBits(again)

    def _due(self, step: int, interval: int) -> bool:
        """True if an action of every `interval` steps, and of the last, is due after `step`."""
        return step % interval == 0 or step == self.plan.num_steps

    def _save(self, state: State, saver: checkpoint.Saver) -> None:
        last = state.step == self.plan.num_steps
        if state.step and (last or saver.due(state.step, self.run.checkpoint_every)):
            saver.save(state.step, vars(state))

    def _write(self, step: int, state: dict[str, Any]) -> None:
        save(self.run.run_dir, step, state)
        released.drop(self.run.run_dir, step)  # the checkpoint has it
        others = self.elsewhere or step < self.released_before
        if not others or step == self.plan.num_steps:
            released.note_elsewhere(self.run.run_dir, "")
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
            "host": self.host if state.resumed_elsewhere else self.first_host,
        }
