"""Advice of `fedsim recommend`: the choice, commands, a table.

Algorithms are compared by the noise on sums of gradients, since parameters are such sums
(`noise.correlated`).
"""

import dataclasses
import itertools
import shlex
from typing import Any

from fedsim.accounting import at_most
from fedsim.config import (
    HIDDEN,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    flags_of,
    run_config,
    settings_of,
    to_json,
)
from fedsim.run import aligned


@dataclasses.dataclass(frozen=True)
class Advice:
    """Settings for one algorithm, and the noise, data and time to expect."""

    algorithm: Algorithm
    group_size: int
    batch_size: int
    """Gradients per step, expected at most: B, or G M."""
    expected_count: int
    """B (ELS) or M (ULS)."""
    sampling_prob: float
    """p (ELS) or q (ULS)."""
    clip_norm: float
    """C: median gradient norm of a sample, L_ELS or L_ULS."""
    noise_multiplier: float
    """sigma."""
    noise_per_step: float
    """C sigma / B or C sigma / M: standard deviation per coordinate, in the gradient's unit."""
    noise_on_sums: float
    """Standard deviation per coordinate of the noise on the sum of all mean gradients so far, in
    the gradient's unit: root mean square over the steps."""
    settings: dict[str, Any]
    """All settings of this training by name, in JSON's types: arguments of `fedsim.train`."""
    command: list[str]
    """Words of the command that trains with these settings."""


def choose(els: Advice, uls: Advice) -> tuple[Advice, str]:
    """The advice with less noise on sums of gradients, and the reason in a sentence.

    With independent noise that is the one with less noise per step (Equation 7).
    """
    best, other = (els, uls) if els.noise_on_sums <= uls.noise_on_sums else (uls, els)
    ratio = best.noise_on_sums / other.noise_on_sums
    reason = (
        f"for {best.batch_size:,} gradients a step, it adds {ratio:.2f} times the noise of "
        f"{other.algorithm.upper()} to sums of steps"
    )
    return best, reason


def to_train(
    algorithm: Algorithm, settings: PrivacyConfig, given: PrivacyConfig, run: RunConfig
) -> dict[str, Any]:
    """The settings to train with, by name, without those at their defaults.

    Args:
      settings: recommended settings.
      given: settings as requested; a delta that is None there is left to its default.
    """
    flags: dict[str, Any] = {"data": run.data.source}
    for name in ("epsilon", "delta", "num_steps", "batch_size", "group_size", "clip_norm"):
        if name != "delta" or given.delta is not None:
            flags[name] = getattr(settings, name)
    usual = settings_of(PrivacyConfig(1.0, 1))
    looked = ["clip_norm"] if settings.clip_norm != given.clip_norm else []
    if given.group_size is None and (algorithm == Algorithm.ELS or looked):
        looked.insert(0, "group_size")  # the median, or by norms
    if looked:
        flags["tuned_on_data"] = ",".join(looked)
    usual |= settings_of(run_config(data=run.data.source, run_dir=run.run_dir))
    for name, value in {**settings_of(given), **settings_of(run)}.items():
        if name not in {*flags, "resume"} and value != usual[name]:
            flags[name] = value
    names = (f"{algorithm}-{n}" if n > 1 else algorithm for n in itertools.count(1))
    flags["run_dir"] = next(p for name in names if not (p := run.run_dir / name).exists())
    return {name: to_json(value) for name, value in flags.items()}


def command(algorithm: Algorithm, settings: dict[str, Any]) -> list[str]:
    """Words of the `fedsim train` command for the settings of `to_train`."""
    words = ["fedsim", "train", str(algorithm)]
    known = flags_of(PrivacyConfig) | flags_of(RunConfig)
    for name, value in settings.items():
        if HIDDEN in known[name].marks:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *value]
        else:
            words += [f"--{flag}", f"{value:.15g}" if name == "epsilon" else str(value)]
    return words


ROWS = {
    "group size G": "{group_size:,}",
    "examples (ELS) or users (ULS) per step": "{expected_count:,}",
    "chance of each to be drawn": "{sampling_prob:.3g}",
    "clip norm C": "{clip_norm:.4g}",
    "noise multiplier": "{noise_multiplier:.4f}",
    "noise per step": "{noise_per_step:.3g}",
    "noise on sums of steps": "{noise_on_sums:.3g}",
    "gradients per step": "{batch_size:,}",
}
"""Rows of the table, with the shapes of their values."""


def report(result: dict[str, Any]) -> str:
    """The result of `recommend` as text: the answer, commands, and a table."""
    best, other = ("els", "uls") if result["recommended"] == "els" else ("uls", "els")
    columns = result["els"], result["uls"]
    rows = [(name, *(shape.format(**each) for each in columns)) for name, shape in ROWS.items()]
    return "\n".join(
        [
            f"Use {best.upper()}: {result['reason']}.",
            "",
            shlex.join(result[best]["command"]),
            "",
            f"# alternative ({other.upper()}):",
            shlex.join(result[other]["command"]),
            "",
            f"{result['num_users']:,} users, {result['num_examples']:,} examples, the median user "
            f"has {result['median_examples']:,}; epsilon {result['epsilon']:g} at delta "
            f"{at_most(result['delta'], '.3g')}; {result['epsilon_holds']}",
            "",
            *aligned([("", "ELS", "ULS"), *rows]),
            "",
            'Lower "noise on sums of steps" means better training: compare the columns.',
            "From the users' texts, without noise: how many examples there are, G, C, and so the "
            "choice.",
            *result["non_private"],
            "To choose privately, within epsilon: group_size_epsilon replaces group_size (els), "
            "and clip_quantile adapts clip_norm.",
        ]
    )
