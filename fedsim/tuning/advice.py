"""What `fedsim recommend` says: advice on each algorithm, the choice, commands, a table, a plot."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from fedsim.config import Algorithm, PrivacyConfig, RunConfig, run_config, settings_of
from fedsim.tuning.cells import Cell, table

CELL = ("sampling", "noise", "bands", "participations")
"""The settings of who takes part when, and of noise."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """How to set one algorithm, and what to expect of it."""

    algorithm: Algorithm
    group_size: int
    batch_size: int
    """Gradients per step, expected at most: B, or G M."""
    expected_count: int
    """B (ELS) or M (ULS)."""
    sampling_prob: float
    """p (ELS) or q (ULS)."""
    clip_norm: float
    """C: the median gradient norm of a sample, L_ELS or L_ULS."""
    clip_norm_interval: tuple[float, float] | None
    """Where the median of all is, with 95 % confidence; None: fewer than six were looked at."""
    noise_multiplier: float
    """sigma."""
    noise_per_step: float
    """C sigma / B or C sigma / M: standard deviation per coordinate, in the gradient's unit."""
    added_stddev: float
    """What training adds to each coordinate of a step's (clipped) mean gradient: the same, but for
    normalised clipping, which divides gradients by C, sigma / B or sigma / M."""
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
    """Share of the training examples that some step is expected to use."""
    gradients: float
    """Expected number, over all steps."""
    strategy: str | None
    """How training would compute its clipped sums; None: nothing was computed."""
    seconds: float | None
    """How long such a training takes on the present workers, without evaluation."""
    command: list[str]
    """The words of the command that trains so."""


def choose(els: Advice, uls: Advice) -> tuple[Advice, str]:
    """The one with less noise on sums of gradients, and the reason in a sentence.

    With independent noise that is the one with less noise per step (Equation 7).
    """
    best, other = (els, uls) if els.noise_on_sums <= uls.noise_on_sums else (uls, els)
    ratio = best.noise_on_sums / other.noise_on_sums
    reason = (
        f"for {best.batch_size:,} gradients a step, {best.algorithm.upper()} adds {ratio:.2f} "
        f"times the noise of {other.algorithm.upper()} to sums of mean gradients "
        f"({best.noise_on_sums:.3g} against {other.noise_on_sums:.3g})"
    )
    return best, reason


def command(
    algorithm: Algorithm, settings: PrivacyConfig, given: PrivacyConfig, run: RunConfig
) -> list[str]:
    """`fedsim train` with these settings. A delta that was not given is derived again."""
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
        flags["chosen_on_data"] = ",".join(looked)
    usual |= settings_of(run_config(data=run.data.source, run_dir=run.run_dir))
    for name, value in {**settings_of(given), **settings_of(run)}.items():
        if name not in {*flags, "resume"} and value != usual[name]:
            flags[name] = value
    flags["run_dir"] = run.run_dir / algorithm
    words = ["fedsim", "train", str(algorithm)]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", f"{value:g}" if name == "epsilon" else str(value)]
    return words


def report(result: dict[str, Any]) -> str:
    """The result for people."""
    els, uls = result["els"], result["uls"]
    rows = [
        ("group size G", "{group_size:,}"),
        ("expected count B, M", "{expected_count:,}"),
        ("probability p, q", "{sampling_prob:.3g}"),
        ("clip norm C", "{clip_norm:.4g}"),
        ("between (95 %)", "{between}"),
        ("noise multiplier", "{noise_multiplier:.4f}"),
        ("sampling", "{sampling}"),
        ("noise", "{noise}"),
        ("noise per step", "{noise_per_step:.3g}"),
        ("noise on sums", "{noise_on_sums:.3g}"),
        ("data used", "{data_used:.1%}"),
        ("gradients per step", "{batch_size:,}"),
        ("gradients", "{gradients:,.0f}"),
        ("minutes", "{minutes}"),
    ]
    looked = result["looked_at"] is not None
    unknown = () if looked else ("between (95 %)", "minutes")
    cells = [{**each, **_of_people(each)} for each in (els, uls)]
    lines = [
        f"{result['num_users']:,} users, {result['num_examples']:,} examples, the median user has "
        f"{result['median_examples']:,}; epsilon {result['epsilon']:g} at delta "
        f"{result['delta']:.3g}; {result['epsilon_holds']}",
        f"{'':20} {'ELS':>14} {'ULS':>14}",
    ]
    for name, shape in rows:
        if name not in unknown:
            first, second = (shape.format(**each) for each in cells)
            lines.append(f"{name:20} {first:>14} {second:>14}")
    for each in cells:
        if each["cells"]:
            name = each["algorithm"].upper()
            lines.append(f"{name}: noise on sums of mean gradients, in units of the first line's")
            lines += [f"  {line}" for line in table([Cell(**cell) for cell in each["cells"]])]
    rest = f"minutes are for {result['workers']}"
    if not looked:
        rest = "no gradient was computed: ULS has G = 1, where both have the same gradients, "
        rest += "and C is 1"
    lines += [
        f"noise per step is C sigma / count per coordinate, noise on sums the root mean square of "
        f"that on the sum of all steps so far; {rest}",
        *(f"not private: {fact}" for fact in result["non_private"]),
        "privately, within epsilon: --group-size-epsilon E in the place of --group-size (els), and "
        "--clip-quantile Q beside --clip-norm",
        f"recommended: {result['recommended'].upper()}: {result['reason']}",
    ]
    first, second = (els, uls) if result["recommended"] == "els" else (uls, els)
    lines += [shlex.join(first["command"]), "the other: " + shlex.join(second["command"])]
    return "\n".join(lines)


def _of_people(advice: dict[str, Any]) -> dict[str, str]:
    """What reads otherwise than its value."""
    interval, seconds = advice["clip_norm_interval"], advice["seconds"]
    return {
        "between": "" if interval is None else "{:.3g} to {:.3g}".format(*interval),
        "minutes": "" if seconds is None else f"{seconds / 60:.3g}",
    }


def draw(rows: list[dict[str, Any]], file: Path, num_users: int) -> None:
    """A PNG of noise per step against group size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for algorithm, colour in (("ELS", "tab:blue"), ("ULS", "tab:orange")):
        own = [row for row in rows if row["algorithm"] == algorithm]
        groups, noise = ([row[name] for row in own] for name in ("group_size", "noise_per_step"))
        axis.plot(groups, noise, "-o", color=colour, label=algorithm)
    axis.set_xscale("log", base=2)
    axis.set(yscale="log", xlabel="group size", ylabel="noise per step (C sigma / count)")
    axis.set_title(f"{num_users:,} users")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(file, dpi=120, metadata={"Software": None})
