"""Advice of `fedsim recommend`: sampling and noise, the choice, commands, a table.

Ways of sampling are compared with a kind of noise each, at one epsilon, by the noise on sums of
gradients, since parameters are such sums (`noise.correlated`), and by their cost: more gradients,
or memory for rows of noise. The comparison uses public quantities only.
"""

import dataclasses
import functools
import os
import shlex
from collections.abc import Sequence
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
    POISSON,
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
from fedsim.sampling import Users, graph_of
from fedsim.training import Noise, with_defaults

ADDING = ("momentum", "sgd")
"""Optimizers that add gradients up, which correlated noise is meant for."""
MEMORY_SHARE = 1 / 4  # of this machine's, that rows of noise may take
CELL = ("sampling", "noise", "bands", "participations")
"""Settings of sampling and noise."""
MAX_GRADIENTS = 9 / 8  # of the batch size, of random allocation, for K divides the number of steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A way of sampling with a kind of noise, its noise and its cost."""

    sampling: str
    noise: str
    bands: int | None = None
    participations: int | None = None
    batch_size: int
    """Gradients per step, expected at most."""
    noise_multiplier: float
    """sigma."""
    ratio: float
    """Noise on sums of mean gradients, relative to Poisson sampling with independent noise: root
    mean squares over the steps."""
    row_bytes: int = 0
    """Memory of the driver for the noise of earlier steps."""
    against: str = ""
    """Reason why it must not be chosen, however little its noise; empty if it may be."""

    @property
    def changes(self) -> dict[str, Any]:
        """Settings of a PrivacyConfig that differ from the defaults."""
        if self.sampling == POISSON:
            return {}
        return {name: getattr(self, name) for name in (*CELL, "batch_size")}


def compare(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    users: Users,
    num_parameters: int,
) -> list[Cell]:
    """Candidate ways of sampling and kinds of noise, Poisson sampling first.

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

    def cell(prediction: Prediction, batch_size: int = privacy.batch_size, **fields: Any) -> Cell:
        # Errors are in units of the sensitivity; a step's mean is over batch_size // group units.
        usual = poisson.error / (privacy.batch_size // group)
        ratio = prediction.error / (batch_size // group) / usual
        sigma = prediction.noise_multiplier
        return Cell(batch_size=batch_size, noise_multiplier=sigma, ratio=ratio, **fields)

    cells = [cell(poisson, sampling=POISSON, noise=INDEPENDENT)]
    if algorithm == Algorithm.ULS:
        settings = dataclasses.replace(privacy, sampling=ALLOCATION)
        settings = allocated(algorithm, settings, users.num_users)
        too_many = settings.batch_size > MAX_GRADIENTS * privacy.batch_size
        against = "more gradients than the batch size" if too_many else ""
        fields = {"participations": settings.participations, "against": against}
        prediction, size = _of_allocation(settings), settings.batch_size
        cells.append(cell(prediction, size, sampling=ALLOCATION, noise=INDEPENDENT, **fields))
    optimizer = str(
        with_defaults(changed_run(run, learning_rate=1.0), Noise(1.0, 1.0, 1)).optimizer
    )
    for banded in cyclic:
        stddev = banded.noise_multiplier * 2.0 ** lattice_bits(num_parameters)
        rows = strategy(privacy.num_steps, banded.bands, stddev)
        size = rows.bytes_per_number * num_parameters
        fields = {"bands": banded.bands, "row_bytes": size, "against": _against(optimizer, size)}
        cells.append(cell(banded, sampling=CYCLIC, noise=CORRELATED, **fields))
    return cells


def _against(optimizer: str, row_bytes: int) -> str:
    """Reason against correlated noise with this optimizer and memory; empty if there is none."""
    if optimizer.partition(":")[0] not in ADDING:
        return f"{optimizer} does not add gradients up"
    return "too much memory for this machine" if row_bytes > MEMORY_SHARE * _memory() else ""


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


def least_noisy(cells: Sequence[Cell]) -> Cell:
    """The candidate with the least noise on sums of gradients, among those that may be chosen."""
    return min((cell for cell in cells if not cell.against), key=lambda cell: cell.ratio)


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
    clip_norm_interval: tuple[float, float] | None
    """95 % confidence interval of the median over all users; None: fewer than six were sampled."""
    noise_multiplier: float
    """sigma."""
    noise_per_step: float
    """C sigma / B or C sigma / M: standard deviation per coordinate, in the gradient's unit."""
    added_stddev: float
    """Standard deviation of the noise that training adds to each coordinate of a step's mean
    clipped gradient. With normalised clipping, which divides gradients by C, sigma / B or sigma /
    M; else noise_per_step."""
    sampling: str
    noise: str
    bands: int | None
    participations: int | None
    noise_on_sums: float
    """Standard deviation per coordinate of the noise on the sum of all mean gradients so far, in
    the gradient's unit: root mean square over the steps."""
    cells: list[Cell]
    """Ways of sampling with kinds of noise, of which that with the least noise on sums was chosen;
    empty: they were given."""
    data_used: float
    """Expected fraction of the training examples that some step uses."""
    gradients: float
    """Expected number of gradients over all steps."""
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
    algorithm: Algorithm,
    settings: PrivacyConfig,
    given: PrivacyConfig,
    run: RunConfig,
    *,
    from_data: bool = True,
) -> dict[str, Any]:
    """The settings to train with, by name, without those at their defaults.

    Args:
      settings: recommended settings.
      given: settings as requested; a delta that is None there is left to its default.
      from_data: settings were chosen by looking at the data without noise, as the run shall say.
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
    if looked and from_data:
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


ROWS = [
    ("group size G", "{group_size:,}"),
    ("examples (ELS) or users (ULS) per step", "{expected_count:,}"),
    ("chance of each to be drawn", "{sampling_prob:.3g}"),
    ("clip norm C", "{clip_norm:.4g}"),
    ("  95 % interval", "{between}"),
    ("noise multiplier", "{noise_multiplier:.4f}"),
    ("sampling", "{sampling}"),
    ("noise", "{noise}"),
    ("noise per step", "{noise_per_step:.3g}"),
    ("noise on sums of steps", "{noise_on_sums:.3g}"),
    ("data used", "{data_used:.1%}"),
    ("gradients per step", "{batch_size:,}"),
    ("gradients in all", "{gradients:,.0f}"),
]
"""Rows of the table, with the shapes of their values."""


def report(result: dict[str, Any]) -> str:
    """The result of `recommend` as text: the answer, commands, and a table."""
    best, other = ("els", "uls") if result["recommended"] == "els" else ("uls", "els")
    median = f"{result['median_examples']:,}"
    if result["looked_at"] is not None:
        examples = f"{result['num_examples']:,} examples, the median user has {median}"
        source = (
            "From the users' texts, without noise: how many examples there are, G, C and its "
            "interval, data used and gradients, and so the choice. plan_only reads nothing."
        )
    else:
        examples = f"and {median} examples of each are assumed"
        source = "Defaults used because no text was read: C = 1, G = 1 for ULS."
    return "\n".join(
        [
            f"Use {best.upper()}: {result['reason']}.",
            f"{result['outlook']}.",
            "",
            shlex.join(result[best]["command"]),
            "",
            f"# alternative ({other.upper()}):",
            shlex.join(result[other]["command"]),
            "",
            f"{result['num_users']:,} users, {examples}; epsilon {result['epsilon']:g} at delta "
            f"{at_most(result['delta'], '.3g')}; {result['epsilon_holds']}",
            "",
            *_settings_table(result),
            "",
            'Lower "noise on sums of steps" means better training: compare the columns.',
            source,
            *result["non_private"],
            "To choose privately, within epsilon: group_size_epsilon replaces group_size (els), "
            "and clip_quantile adapts clip_norm.",
        ]
    )


def _settings_table(result: dict[str, Any]) -> list[str]:
    """Lines of the table of both algorithms' settings."""
    columns = []
    for each in (result["els"], result["uls"]):
        interval = each["clip_norm_interval"]
        between = "" if interval is None else "{:.3g} to {:.3g}".format(*interval)
        columns.append({**each, "between": between})
    width = max(len(name) for name, _ in ROWS)
    lines = [f"{'':{width}} {'ELS':>15} {'ULS':>15}"]
    for name, shape in ROWS:
        if result["looked_at"] is not None or "between" not in shape:
            first, second = (shape.format(**each) for each in columns)
            lines.append(f"{name:{width}} {first:>15} {second:>15}")
    return lines
