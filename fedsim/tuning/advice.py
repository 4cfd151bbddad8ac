"""Advice of `fedsim recommend`: sampling and noise, the choice, commands, a table.

Ways of sampling are compared with a kind of noise each, at one epsilon, by the noise on sums of
gradients, since parameters are such sums (`noise.correlated`), and by their cost: more gradients,
or memory for rows of noise. The comparison uses public quantities only.
"""

import dataclasses
import functools
import math
import os
import shlex
from typing import Any

from fedsim import accounting
from fedsim.accounting import allocated_event, at_most
from fedsim.clipping import lattice_bits
from fedsim.config import (
    ALLOCATION,
    CORRELATED,
    CYCLIC,
    HIDDEN,
    INDEPENDENT,
    Algorithm,
    PrivacyConfig,
    RunConfig,
    changed_run,
    flags_of,
    run_config,
    settings_of,
    to_json,
)
from fedsim.noise import Prediction, predicted_error, strategy
from fedsim.plan import allocated, bands_predicted
from fedsim.run import aligned
from fedsim.sampling import Users, graph_of
from fedsim.training import Noise, with_defaults

ADDING = ("momentum", "sgd")
"""Optimizers that add gradients up, which correlated noise is meant for."""
MEMORY_SHARE = 1 / 4  # of this machine's, that rows of noise may take
CELL = ("sampling", "noise", "bands", "participations")
"""Settings of sampling and noise."""
MAX_GRADIENTS = 9 / 8  # of the batch size, of random allocation, for K divides the number of steps


@dataclasses.dataclass(frozen=True)
class Cell:
    """A way of sampling with a kind of noise."""

    ratio: float
    """Noise on sums of mean gradients, relative to Poisson sampling with independent noise: root
    mean squares over the steps."""
    noise_multiplier: float
    """sigma."""
    changes: dict[str, Any]
    """Settings of a PrivacyConfig that differ from the defaults."""


def compare(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    users: Users,
    num_parameters: int,
) -> list[Cell]:
    """Ways of sampling with a kind of noise that training can afford, Poisson sampling first.

    Left out are random allocation where it takes more gradients than the batch size, and correlated
    noise where the optimizer does not add gradients up, or rows of noise take too much memory.
    Empty if the user chose one, or texts have several owners.
    Args:
      privacy: from `fill_defaults`.
      num_parameters: number of trained parameters.
    """
    chosen = privacy.sampling is not None or privacy.noise != INDEPENDENT
    if chosen or graph_of(users) is not None:
        return []
    assert privacy.group_size is not None, "fill_defaults comes first"
    group = privacy.group_size if algorithm == Algorithm.ULS else 1
    poisson, *cyclic = bands_predicted(algorithm, privacy, users)

    def cell(prediction: Prediction, **changes: Any) -> Cell:
        # Errors are in units of the sensitivity; a step's mean is over batch_size // group units.
        count = changes.get("batch_size", privacy.batch_size) // group
        usual = poisson.error / (privacy.batch_size // group)
        return Cell(prediction.error / count / usual, prediction.noise_multiplier, changes)

    cells = [cell(poisson)]
    if algorithm == Algorithm.ULS:
        steps = privacy.num_steps
        wanted = max(1, privacy.batch_size // group) / users.num_users * steps
        divisors = [count for count in range(1, steps + 1) if steps % count == 0]
        nearest = min(divisors, key=lambda count: abs(math.log(count / wanted)))
        settings = dataclasses.replace(privacy, sampling=ALLOCATION, participations=nearest)
        settings = allocated(algorithm, settings, users.num_users)
        if settings.batch_size <= MAX_GRADIENTS * privacy.batch_size:
            names = ("sampling", "participations", "batch_size")
            changes = {name: getattr(settings, name) for name in names}
            cells.append(cell(_of_allocation(settings), **changes))
    filled = with_defaults(changed_run(run, learning_rate=1.0), Noise(1.0, 1.0, 1))
    if str(filled.optimizer).partition(":")[0] not in ADDING:
        return cells
    for banded in cyclic:
        stddev = banded.noise_multiplier * 2.0 ** lattice_bits(num_parameters)
        rows = strategy(privacy.num_steps, banded.bands, stddev)
        if rows.bytes_per_number * num_parameters <= MEMORY_SHARE * _memory():
            cells.append(cell(banded, sampling=CYCLIC, noise=CORRELATED, bands=banded.bands))
    return cells


def _of_allocation(privacy: PrivacyConfig) -> Prediction:
    """Predicted noise of random allocation. Args: privacy: from `plan.allocated`."""
    steps, participations = privacy.num_steps, privacy.participations
    assert participations is not None and privacy.delta is not None
    sigma = accounting.calibrate_noise(
        functools.partial(allocated_event, window=steps // participations),
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        num_steps=steps,
    )
    return Prediction(1, sigma, predicted_error(sigma, steps, 1))


def _memory() -> float:
    """Memory of this machine in bytes."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


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
    sampling: str
    noise: str
    bands: int | None
    participations: int | None
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
    flags |= {n: v for n in CELL if (v := getattr(settings, n)) != usual[n]}
    looked = ["clip_norm"] if settings.clip_norm != given.clip_norm else []
    if given.group_size is None and (algorithm == Algorithm.ELS or looked):
        looked.insert(0, "group_size")  # the median, or by norms
    if looked:
        flags["tuned_on_data"] = ",".join(looked)
    usual |= settings_of(run_config(data=run.data.source, run_dir=run.run_dir))
    for name, value in {**settings_of(given), **settings_of(run)}.items():
        if name not in {*flags, "resume"} and value != usual[name]:
            flags[name] = value
    flags["run_dir"] = run.run_dir / algorithm
    return {name: to_json(value) for name, value in flags.items()}


def command(algorithm: Algorithm, settings: dict[str, Any]) -> list[str]:
    """Words of the `fedsim train` command for the settings of `to_train`."""
    words, known = (
        ["fedsim", "train", str(algorithm)],
        flags_of(PrivacyConfig) | flags_of(RunConfig),
    )
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
    "sampling": "{sampling}",
    "noise": "{noise}",
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
