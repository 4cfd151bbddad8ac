"""How often an audit refutes a training that is wrong, and one that is right.

Claim: the audit never refutes a training that does what it says; it refutes each planted mistake in
half of the audits at least: no noise, half of it, gradients that are not clipped, users redrawn in
every step where a group in turn was accounted, and no bound on a user's contributions. With 1,000
gradient canaries.
What refutes: right guesses, whatever canaries have to do with each other; the same guesses, if each
canary tells of its own coin alone; and the length of what is released, less the sum in it.

The steps are those of Algorithms 1 and 2, with the engine, clipping and noise of `fedsim train`,
at fixed parameters: guesses are made of nothing but the privatised gradients. The other users'
gradients are zero, for an attacker may know them and subtract them. Rows are appended to
audits.jsonl beside the results as they come; the same command goes on with what is missing.

    python -m experiments.audits --scale small [--minutes 60]
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.mean_task import MeanTask
from experiments.harness.records import came_from
from experiments.harness.rows import append, by, kept, missing
from fedsim import accounting, engine
from fedsim.clipping import Clip
from fedsim.els import ELS
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.noise import add_gaussian
from fedsim.sampling import Sampling
from fedsim.trust.audit import SHARP
from fedsim.trust.bounds import (
    Claim,
    audit_curve,
    audit_independent,
    audit_noise,
    curve_claim,
)
from fedsim.trust.canaries import LENGTH, POOLS, Canaries, CanaryTask, coins
from fedsim.uls import ULS

METHODS = {"els": ELS, "uls": ULS}
POINTS = 400  # of the claimed curve
COUNTED = ("refuted", "by_guesses", "if_independent", "by_noise")
MEDIANS = ("epsilon_found", "epsilon_if_independent")


@dataclasses.dataclass(frozen=True)
class Mistake:
    """How a training differs from what is claimed of it."""

    name: str
    right: bool = False
    noise: float = 1.0
    """Of what was calibrated."""
    clip: float = 1.0
    """What gradients are clipped to, in units of what noise is for."""
    contributions: int = 1
    """Examples of a user in the pool, in units of the cap; of ELS."""
    bands: int = 1
    """Accounted: a user can be drawn in one of so many steps."""
    in_turn: bool = True
    """Whether that is so."""


MISTAKES = (
    Mistake("none", right=True),
    Mistake("none, groups in turn", right=True, bands=8),
    Mistake("half of the noise", noise=0.5),
    Mistake("no noise", noise=0.0),
    Mistake("C not enforced", clip=LENGTH),
    Mistake("users redrawn in every step", bands=8, in_turn=False),
    Mistake("no contribution bound", contributions=POOLS),
)
BY_NAME = {each.name: each for each in MISTAKES}


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    trials: int = 20
    epsilons: tuple[float, ...] = (2.0, 4.0, 8.0)
    canaries: int = 1000
    num_users: int = 700
    """The canaries that are there, and others."""
    num_steps: int = 32
    share: float = 0.5
    """q, or p: of the users, or places of the pool, that can be drawn in a step."""
    group_size: int = 2
    delta: float = 1e-6
    confidence: float = 0.95
    mistakes: tuple[str, ...] = tuple(BY_NAME)


SETTINGS = {
    "smoke": Settings(
        trials=1,
        epsilons=(4.0,),
        canaries=300,
        num_users=240,
        num_steps=8,
        mistakes=("none", "C not enforced"),
    ),
    "small": Settings(),
    "paper": Settings(trials=100, epsilons=(1.0, 2.0, 4.0, 8.0, 16.0)),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """An audit."""

    trial: int
    algorithm: str
    mistake: str
    epsilon: float


def cells(settings: Settings) -> Iterator[Cell]:
    """All audits, in the order in which they are run."""
    for trial, algorithm in itertools.product(range(settings.trials), METHODS):
        for mistake, epsilon in itertools.product(settings.mistakes, settings.epsilons):
            if algorithm == "els" or BY_NAME[mistake].contributions == 1:
                yield Cell(trial, algorithm, mistake, epsilon)


def attack(cell: Cell, settings: Settings) -> dict[str, Any]:
    """What an audit says of a training that claims `cell.epsilon`."""
    mistake, started = BY_NAME[cell.mistake], time.monotonic()
    rng = np.random.default_rng([cell.trial, *cell.mistake.encode(), *cell.algorithm.encode()])
    included = coins(settings.canaries, rng)
    own = settings.group_size * (POOLS if cell.algorithm == "els" else 1)
    plant = Canaries(settings.canaries, 0, own, 1.0, included, rng)
    owners = np.repeat(np.flatnonzero(included), own).astype(np.int32)
    size = settings.num_users * own
    owners = np.concatenate([np.full(size - len(owners), -1, np.int32), owners])
    users: Any = SimpleNamespace(
        offsets=np.arange(settings.num_users + 1) * own,
        num_users=settings.num_users,
        num_examples=size,
    )
    task = CanaryTask(
        MeanTask(np.zeros((size, settings.canaries))),  # whoever attacks may know all others' texts
        owners,
        plant.directions,
        plant.clip_norm,
    )
    clip = Clip(mistake.clip)
    method, prob = _method(cell, mistake, settings, users)
    cap = settings.group_size if cell.algorithm == "els" else 1
    sigma, claim = claimed(cell.epsilon, prob, cap, mistake.bands, settings)
    local, params = LocalEngine(task, num_lanes=1), jnp.zeros(settings.canaries)
    add_noise = plant.record_noise(add_gaussian)
    for step in range(settings.num_steps):
        # noise in units of what a gradient is really clipped to
        noise = mistake.noise * sigma / clip.norm
        how = {"clip": clip, "noise_multiplier": noise, "add_noise": add_noise}
        noisy, _ = method.gradient(params, step, local, **how)
        plant.on_release(noisy.values(), 1 / method.sampler.expected_count)
    scores, rest = plant.gradient_scores(), (settings.delta, settings.confidence)
    curve = audit_curve(scores, included, claim, *rest)
    sharp = settings.delta, SHARP * (1 - settings.confidence)
    alone = audit_independent(scores, included, claim, *sharp)
    steps = accounting.cyclic_event(sigma, prob, cap, mistake.bands), settings.num_steps
    of_noise = audit_noise(plant.noise, [steps], *sharp)
    return {
        **dataclasses.asdict(cell),
        "noise_multiplier": sigma,
        "refuted": curve.refuted or alone.refuted or of_noise.refuted,
        **{"by_guesses": curve.refuted, "if_independent": alone.refuted},
        **{"by_noise": of_noise.refuted},
        **{"epsilon_found": curve.epsilon, "epsilon_if_independent": alone.epsilon},
        **{"correct": alone.correct, "most_expected": alone.most_expected},
        "noise_at_most": of_noise.noise_multiplier,
        "seconds": round(time.monotonic() - started, 1),
        **came_from(),
    }


def _method(cell: Cell, mistake: Mistake, settings: Settings, users: Any) -> tuple[Any, float]:
    """What takes the steps, and the probability that is accounted for each of them."""
    els, bands = cell.algorithm == "els", mistake.bands
    group = settings.group_size * mistake.contributions
    places = users.num_users * (group if els else 1)
    count = round(settings.share * places / (bands if mistake.in_turn else 1))
    cyclic = bands > 1 and mistake.in_turn
    method = METHODS[cell.algorithm](
        users,
        batch_size=count * (1 if els else group),
        group_size=group,
        sampling=Sampling("cyclic", bands) if cyclic else Sampling("poisson"),
        key=SecretKey.create(),
    )
    return method, count / places / (1 if mistake.in_turn else bands)


@functools.cache
def claimed(
    epsilon: float, prob: float, cap: int, bands: int, settings: Settings
) -> tuple[float, Claim]:
    """(noise multiplier, the whole curve) of a training that claims epsilon."""

    def event(sigma: float) -> accounting.StepEvent:
        return accounting.cyclic_event(sigma, prob, cap, bands)

    target = {"delta": settings.delta, "num_steps": settings.num_steps}
    sigma = accounting.calibrate_noise(event, epsilon=epsilon, **target)
    epsilons = np.linspace(0, 2 * epsilon + 1, POINTS)
    deltas = accounting.privacy_curve([(event(sigma), settings.num_steps)], epsilons)
    return sigma, curve_claim(epsilons, deltas)


def run(settings: Settings, file: Path, minutes: float) -> None:
    """Make the audits that are missing, until there is no time left."""
    engine.keep_compiled()
    ends = time.monotonic() + 60 * minutes
    for cell in missing(cells(settings), file):
        if time.monotonic() >= ends:
            break
        row = attack(cell, settings)
        append(file, [row])
        print(*dataclasses.astuple(cell), row["refuted"], row["seconds"], flush=True)


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each mistake, algorithm and epsilon: how many audits, and how many refuted it."""
    found = []
    for (mistake, algorithm, epsilon), own in by(
        rows, lambda row: (row["mistake"], row["algorithm"], row["epsilon"])
    ).items():
        found.append(
            {
                **{"mistake": mistake, "algorithm": algorithm, "epsilon": epsilon},
                "audits": len(own),
                **{name: sum(row[name] for row in own) for name in COUNTED},
                **{name: float(np.median([row[name] for row in own])) for name in MEDIANS},
            }
        )
    places = {name: i for i, name in enumerate(BY_NAME)}
    return sorted(found, key=lambda r: (places[r["mistake"]], r["algorithm"], r["epsilon"]))


def check(rows: Sequence[dict[str, Any]]) -> common.Claims:
    """What is claimed of the table: of all cells of a mistake, the one where it shows least."""
    right = [row for row in rows if BY_NAME[row["mistake"]].right]
    refuted, audits = (sum(row[name] for row in right) for name in ("refuted", "audits"))
    claims = [("a right training is never refuted", refuted == 0, f"{refuted} of {audits}")]
    where = "{refuted} of {audits} at least ({algorithm}, epsilon = {epsilon:g})"
    for name in dict.fromkeys(row["mistake"] for row in rows):
        own = [row for row in rows if row["mistake"] == name]
        if not BY_NAME[name].right:
            least = min(own, key=lambda row: row["refuted"] / row["audits"])
            held = 2 * least["refuted"] >= least["audits"]
            claims.append((f"refuted half of the time: {name}", held, where.format(**least)))
    return claims


def plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """Power: the share of audits that refute, by mistake, for each epsilon; where none does, and
    where a mistake cannot be made, that is written there."""
    algorithms = sorted({row["algorithm"] for row in rows})
    figure, axes = plt.subplots(
        1, len(algorithms), figsize=(9, 3.5), sharey=True, squeeze=False, layout="constrained"
    )
    names = list(dict.fromkeys(row["mistake"] for row in rows))
    epsilons = sorted({row["epsilon"] for row in rows})
    height = 0.8 / len(epsilons)
    for axis, algorithm in zip(axes[0], algorithms, strict=True):
        for i, epsilon in enumerate(epsilons):
            own = [r for r in rows if r["algorithm"] == algorithm and r["epsilon"] == epsilon]
            places = [names.index(row["mistake"]) + i * height for row in own]
            shares = [row["refuted"] / row["audits"] for row in own]
            axis.barh(places, shares, height, label=rf"$\varepsilon$ = {epsilon:g}")
            for row, place in zip(own, places, strict=True):
                if not row["refuted"]:
                    text = f"0 of {row['audits']}"
                    axis.text(0.01, place, text, va="center", fontsize="xx-small")
        audited = {row["mistake"] for row in rows if row["algorithm"] == algorithm}
        for name in names:
            if name not in audited:
                place, look = names.index(name) + height, {"va": "center", "fontsize": "small"}
                axis.text(0.01, place, "does not apply", color="dimgray", **look)
        axis.set(title=algorithm.upper(), xlabel="share of audits that refute", xlim=(0, 1))
        axis.set_yticks(np.arange(len(names)) + 0.4 - height / 2, names)
    axes[0][0].invert_yaxis()  # which the others share
    common.legend_below(figure)
    return figure


def main() -> None:
    """From the command line to the files."""
    given = common.resumable(__doc__, "audit")
    settings = SETTINGS[given.scale]
    if given.dry_run:
        print(f"{len(list(cells(settings)))} audits of {settings.num_steps} steps")
        print(common.last_time("audits", given.scale))
        return
    out = common.out_of(given)
    file = out / "audits.jsonl"
    run(settings, file, given.minutes)
    found = kept(file)
    rows = table(found)
    own = {"figures": {"audits": plot(rows)}, "claims": check(rows), "trainings": found}
    common.finish("audits", given.scale, out, settings, rows, **own)


if __name__ == "__main__":
    main()
