"""What of a run's settings follows from its plan, or from how it was started."""

import dataclasses
from typing import Any

import optax

from fedsim.clipping import Clip, Strategy
from fedsim.config import UPDATE, EngineConfig, PrivacyConfig, RunConfig
from fedsim.els import ELS
from fedsim.engine import AUTO, Engine, choose_strategy
from fedsim.errors import expect
from fedsim.files import cache_dir
from fedsim.noise import predicted_error
from fedsim.plan import CorrelatedNoise, Plan
from fedsim.run import StoredRun, directory
from fedsim.training.optimizers import rate_of, update_rule
from fedsim.training.recipe import Noise, settled
from fedsim.uls import ULS

FITTED = ("num_steps", "participations", "epsilon")
"""The settings that --spend-rest changes."""


def runnable(privacy: PrivacyConfig, run: RunConfig) -> PrivacyConfig:
    """The settings to run with: `as_started`.

    Raises: ConfigError: no data could be trained on with these.
    """
    privacy = as_started(privacy, run)
    update_of(settled(run, Noise(1.0, 1.0, 1)), privacy.num_steps)
    expect_strategy(run.engine)
    return privacy


def as_started(privacy: PrivacyConfig, run: RunConfig) -> PrivacyConfig:
    """The settings, with the steps that fitted when the run was started, if it goes on."""
    if not (run.spend_rest and run.resume and (run.run_dir / directory.CONFIG).exists()):
        return privacy
    stored = directory.load(run.run_dir).privacy
    return dataclasses.replace(privacy, **{name: getattr(stored, name) for name in FITTED})


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
    if isinstance(plan.noise, CorrelatedNoise) and plan.strategy:
        # What steps add up to has noise of as much as independent noise of less.
        stddev *= plan.noise.predicted_error / predicted_error(
            plan.noise_multiplier, plan.num_steps, 1
        )
    return settled(run, Noise(stddev, bound, plan.num_steps), fresh=fresh)


def expect_strategy(config: EngineConfig) -> None:
    """Raises ConfigError: a strategy that there is not."""
    if config.strategy != AUTO:
        Strategy.parse(config.strategy)


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
