"""Beyond the paper: correlated noise, and random allocation, at the epsilon of independent noise.

Three parts. `errors`: the noise of sums of gradients that each kind is predicted to have, at the
shapes of real data, and the noise of random allocation, by computation. `accounting`: epsilon of
cyclic sampling beside dp_accounting's of ceil(T / b) steps of Poisson sampling. `training`: the
held-out loss with each, and without noise, after T steps of momentum, with rates tuned alike, on
the first seed; how much of what privacy costs is won back.

Rows of trainings are appended to correlated_training.jsonl beside the results as they come; the
same command goes on with what is missing, for --minutes.

    python -m experiments.correlated --scale small [--minutes 60]    (--minutes 0: no training)
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.records import came_from
from experiments.harness.rows import Rows, append, by, kept, missing
from fedsim.data import corpora

NONE, INDEPENDENT, CORRELATED, ALLOCATION = "none", "independent", "correlated", "allocation"
AIM = 0.3
"""Of the gap between training with independent noise and without any."""
AGREEMENT = 1e-4  # relative, to dp_accounting on the same grid


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    shapes: tuple[tuple[int, int, int], ...] = ((8_876, 500, 128), (342_477, 2_000, 1_024))
    """(users, steps, expected users or examples of a step)."""
    epsilons: tuple[float, ...] = (1.0, 4.0, 8.0)
    els_group_size: int = 4
    noise_multipliers: tuple[float, ...] = (0.8, 1.5, 4.0)
    shares: tuple[float, ...] = (0.002, 0.01, 0.02)
    bands: tuple[int, ...] = (2, 8)
    caps: tuple[int, ...] = (1, 4)
    algorithms: tuple[str, ...] = ("uls", "els")
    trained_epsilons: tuple[float, ...] = (4.0, 1.0, 8.0)
    num_steps: int = 500
    budget: int = 64
    max_length: int = 32
    learning_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    data: str = "scotus"
    eval_examples: int = 1024


SETTINGS = {
    "smoke": Settings(
        shapes=((8_876, 20, 128),),
        epsilons=(4.0,),
        noise_multipliers=(1.5,),
        shares=(0.01,),
        caps=(1,),
        num_steps=2,
        budget=8,
        max_length=24,
        learning_rates=(0.1,),
        algorithms=("uls",),
        trained_epsilons=(4.0,),
        seeds=(0,),
        data="pydocs",
        eval_examples=16,
    ),
    "small": Settings(),
    "paper": Settings(
        budget=128,
        max_length=64,
    ),
}


def errors(settings: Settings) -> list[dict[str, Any]]:
    """A row for each shape, algorithm and epsilon."""
    from fedsim import accounting
    from fedsim.noise import best, predictions

    rows = []
    for (users, steps, count), epsilon in itertools.product(settings.shapes, settings.epsilons):
        for algorithm, cap in (("uls", 1), ("els", settings.els_group_size)):
            target = {"epsilon": epsilon, "delta": users**-1.1, "num_steps": steps}
            target |= {"sampling_prob": count / (users * cap), "max_contributions": cap}
            found = predictions(
                lambda bands, target=target: accounting.noise_multiplier(bands=bands, **target),
                steps,
                users * cap // count,
            )
            one, chosen = found[0], best(found)
            rows.append(
                {
                    **{"algorithm": algorithm, "num_users": users, **target},
                    "independent_noise_multiplier": one.noise_multiplier,
                    "independent_error": one.error,
                    "bands": chosen.bands,
                    "noise_multiplier": chosen.noise_multiplier,
                    "error": chosen.error,
                    "ratio": chosen.error / one.error,
                    **allocation(algorithm, users, count, epsilon, steps),
                }
            )
            print(algorithm, users, steps, epsilon, chosen, f"{chosen.error / one.error:.3f}")
    return rows


def allocation(
    algorithm: str, users: int, count: int, epsilon: float, steps: int
) -> dict[str, Any]:
    """Random allocation's noise, and how much it is of Poisson sampling's of as many users a step:
    K divides the steps, so they are not quite `count`. Nothing of ELS, where it is refused."""
    from fedsim import accounting
    from fedsim.config import Algorithm, PrivacyConfig
    from fedsim.plan import allocated

    names = ("participations", "allocation_noise_multiplier", "allocation_ratio")
    if algorithm == "els":
        return dict.fromkeys(names)
    privacy = PrivacyConfig(epsilon, steps, count, sampling=ALLOCATION)
    participations = allocated(Algorithm.ULS, privacy, users).participations
    assert participations is not None
    window, target = steps // participations, {"epsilon": epsilon, "delta": users**-1.1}
    sigma = accounting.calibrate_noise(
        lambda sigma: accounting.allocated_event(sigma, window), num_steps=steps, **target
    )
    poisson = accounting.noise_multiplier(sampling_prob=1 / window, num_steps=steps, **target)
    return dict(zip(names, (participations, sigma, sigma / poisson), strict=True))


def draw(rows: Sequence[dict[str, Any]]) -> Figure:
    """Error of correlated noise, in units of that of independent noise, against epsilon."""
    figure, axis = plt.subplots(figsize=(5, 3.5), layout="constrained")
    lines: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["algorithm"].upper(), row["num_users"]), []).append(row)
    for (algorithm, users), own in lines.items():
        look: dict[str, Any] = {
            "color": common.COLOURS[algorithm],
            "label": f"{algorithm}, {users:,} users",
        }
        style = "-o" if users == rows[0]["num_users"] else "--s"
        axis.plot([row["epsilon"] for row in own], [row["ratio"] for row in own], style, **look)
    axis.set(xlabel=r"$\varepsilon$", ylabel="error / that of independent noise", ylim=(0, 1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    return figure


def agreement(settings: Settings) -> list[dict[str, Any]]:
    """Epsilon of cyclic sampling, and dp_accounting's of its definition, on one grid."""
    import dp_accounting
    from dp_accounting import pld

    from fedsim import accounting

    rows, steps, delta, grid = [], 100, 1e-6, 1e-3
    axes = (settings.noise_multipliers, settings.shares, settings.bands, settings.caps)
    for sigma, share, bands, cap in itertools.product(*axes):
        event = accounting.cyclic_event(sigma, share, cap, bands)
        found = accounting.epsilon([(event, steps)], delta, discretization=grid)
        poisson = accounting.StepEvent(sigma, bands * share, cap).to_dp_event()
        accountant = pld.PLDAccountant(value_discretization_interval=grid)
        accountant.compose(dp_accounting.SelfComposedDpEvent(poisson, math.ceil(steps / bands)))
        library = accountant.get_epsilon(delta)
        rows.append(
            {
                **{"noise_multiplier": sigma, "sampling_prob": share, "bands": bands},
                **{"max_contributions": cap, "num_steps": steps, "delta": delta},
                **{"epsilon": found, "dp_accounting": library},
                "difference": found / library - 1,
            }
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training."""

    seed: int
    algorithm: str
    epsilon: float
    noise: str
    learning_rate: float


def cells(settings: Settings, rows: Rows) -> Iterator[Cell]:
    """What can be run after `rows`, in its order: on the first seed the rates that tuning asks for,
    on the others the rate that it chose."""
    for seed, epsilon, algorithm in itertools.product(
        settings.seeds, settings.trained_epsilons, settings.algorithms
    ):
        for noise in kinds(algorithm):
            rate, asked = tuned(algorithm, epsilon, noise, settings, rows)
            if seed != settings.seeds[0]:
                asked = [] if rate is None else [rate]
            for each in asked:
                yield Cell(seed, algorithm, epsilon, noise, each)


def tuned(
    algorithm: str, epsilon: float, noise: str, settings: Settings, rows: Rows
) -> tuple[float | None, list[float]]:
    """(The rate of the least loss on the first seed, None before both of its neighbours are there;
    the rates that are to be run to know it). One climbs down from the middle of the rates."""
    own = {"seed": settings.seeds[0], "algorithm": algorithm, "epsilon": epsilon, "noise": noise}
    losses = {row["learning_rate"]: row["loss"] for row in rows if own.items() <= row.items()}
    rates = settings.learning_rates
    if not losses:
        return None, [rates[len(rates) // 2]]
    best = rates.index(min(losses, key=lambda rate: (math.isnan(losses[rate]), losses[rate])))
    asked = [rate for rate in rates[max(best - 1, 0) : best + 2] if rate not in losses]
    return (None if asked else rates[best]), asked


def num_trainings(settings: Settings) -> int:
    """Of the whole experiment, if tuning takes four rates: other seeds run one."""
    each = sum(len(kinds(algorithm)) for algorithm in settings.algorithms)
    runs = min(4, len(settings.learning_rates)) + len(settings.seeds) - 1
    return each * len(settings.trained_epsilons) * runs


def kinds(algorithm: str) -> tuple[str, ...]:
    """What is compared: random allocation, with independent noise, is for users alone."""
    allocation = (ALLOCATION,) if algorithm == "uls" else ()
    return (INDEPENDENT, CORRELATED, NONE, *allocation)


def source(settings: Settings) -> str:
    """Where the data are."""
    pydocs = settings.data == "pydocs"
    return "pydocs" if pydocs else str(common.shared(settings.data))


def train(cell: Cell, settings: Settings) -> dict[str, Any]:
    """What comes of a cell. Draws are the same for all of a group; so is fresh noise."""
    from fedsim.config import PrivacyConfig, run_config
    from fedsim.engine.worker import LocalEngine
    from fedsim.evaluate import evaluate, headline
    from fedsim.keys import SecretKey
    from fedsim.run import find_model, load_data, make_task
    from fedsim.training.optimizers import update_rule

    started = time.monotonic()
    run = run_config(
        data=source(settings),
        run_dir=Path("."),
        model="tiny",
        engine="local",
        max_length=settings.max_length,
        optimizer="momentum",
        learning_rate=cell.learning_rate,
    )
    data = load_data(run.data, find_model(run.model.source), lambda text: None)
    privacy = PrivacyConfig(
        math.inf if cell.noise == NONE else cell.epsilon,
        settings.num_steps,
        settings.budget,
        noise=CORRELATED if cell.noise == CORRELATED else INDEPENDENT,
        sampling=ALLOCATION if cell.noise == ALLOCATION else None,
    )
    key = SecretKey.create(cell.seed, f"{cell.algorithm} {cell.epsilon}")
    task, params = make_task(run, None, data, key.jax_key("parameters"))
    plan, method = common.planned(cell.algorithm, privacy, data, key, params)
    rule, engine = update_rule(run, cell.learning_rate), LocalEngine(task, num_lanes=1)
    before = headline(evaluate(engine, params, data, settings.eval_examples))
    *_, params = common.iterates(plan, method, engine, params, rule)
    return {
        **dataclasses.asdict(cell),
        **{"num_parameters": plan.num_parameters, "num_users": plan.num_users},
        "num_steps": plan.num_steps,
        **{"expected_count": plan.expected_count, "group_size": plan.group_size},
        **{"bands": plan.sampling.bands, "noise_multiplier": plan.noise_multiplier},
        "predicted_error": plan.noise.predicted_error,
        "before": before,
        "loss": headline(evaluate(engine, params, data, settings.eval_examples)),
        "seconds": round(time.monotonic() - started, 1),
        **came_from(),
    }


def run(settings: Settings, file: Path, minutes: float) -> None:
    """Train what is missing, one after another, until there is no time left."""
    ends = time.monotonic() + 60 * minutes
    while time.monotonic() < ends and (left := missing(cells(settings, kept(file)), file)):
        cell = left[0]
        row = train(cell, settings)
        append(file, [row])
        print(*dataclasses.astuple(cell), row["loss"], row["seconds"], flush=True)


def gaps(settings: Settings, rows: Rows) -> Rows:
    """For each group of which all kinds were trained with their rates: the loss of each kind, and
    the share of the gap that correlated noise closes."""
    found = []
    for (seed, algorithm, epsilon), own in by(
        rows, lambda row: (row["seed"], row["algorithm"], row["epsilon"])
    ).items():
        best: dict[str, dict[str, Any]] = {
            row["noise"]: row
            for row in own
            if row["learning_rate"] == tuned(algorithm, epsilon, row["noise"], settings, rows)[0]
        }
        if best.keys() != set(kinds(algorithm)):
            continue
        gap = best[INDEPENDENT]["loss"] - best[NONE]["loss"]
        nothing = dict.fromkeys(best[NONE])
        private = {k: best.get(k, nothing) for k in (INDEPENDENT, CORRELATED, ALLOCATION)}
        won = {k: best[INDEPENDENT]["loss"] - row["loss"] for k, row in best.items()}
        found.append(
            {
                **{"seed": seed, "algorithm": algorithm, "epsilon": epsilon},
                "before": own[0]["before"],
                **{f"loss_{k}": row["loss"] for k, row in {**private, NONE: best[NONE]}.items()},
                **{f"rate_{k}": private[k]["learning_rate"] for k in private},
                **{f"sigma_{k}": private[k]["noise_multiplier"] for k in private},
                **{f"error_{k}": private[k]["predicted_error"] for k in private},
                "users_allocated": private[ALLOCATION].get("expected_count"),
                "bands": best[CORRELATED]["bands"],
                "closed": won[CORRELATED] / gap,
                "closed_allocation": won[ALLOCATION] / gap if ALLOCATION in won else None,
            }
        )
    return found


def draw_losses(found: Rows, data: str) -> Figure:
    """The loss of each kind, a line for each algorithm and epsilon: mean and range of the seeds."""
    figure, axis = plt.subplots(figsize=(5, 3.5), layout="constrained")
    order = (INDEPENDENT, ALLOCATION, CORRELATED, NONE)
    styles = ("-o", "--s", ":^")
    groups = by(found, lambda row: (row["algorithm"], row["epsilon"]))
    for (algorithm, epsilon), own in sorted(groups.items()):
        shown = [kind for kind in order if own[0][f"loss_{kind}"] is not None]
        losses = np.array([[row[f"loss_{kind}"] for kind in shown] for row in own])
        mean = losses.mean(axis=0)
        axis.errorbar(
            [order.index(kind) for kind in shown],
            mean,
            np.abs(np.array([losses.min(axis=0), losses.max(axis=0)]) - mean),
            fmt=styles[sorted({row["epsilon"] for row in found}).index(epsilon) % len(styles)],
            color=common.COLOURS[algorithm.upper()],
            capsize=2,
            label=f"{algorithm.upper()}, $\\varepsilon$ = {epsilon:g}",
        )
    axis.set_xticks(range(len(order)), order)
    axis.set(ylabel="held-out loss (nats per token)")
    axis.set_title(f"{data}, rates tuned; bars: range of seeds", fontsize="small", color="dimgray")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    return figure


def check(rows: Rows) -> common.Claims:
    """Of `errors`."""
    claim = "correlated noise has less error than independent noise at the same epsilon"
    most, cells = max(row["ratio"] for row in rows), f"{len(rows)} of {len(rows)} cells"
    return [(claim, most < 1, f"at most {most:.2f} of it in {cells}")]


def check_accounting(rows: Rows) -> common.Claims:
    """Of `agreement`."""
    worst = max(abs(row["difference"]) for row in rows)
    claim = f"epsilon of cyclic sampling is dp_accounting's within {AGREEMENT:g}"
    return [(claim, worst <= AGREEMENT, f"{worst:.1e} at most in {len(rows)} settings")]


def check_training(rows: Rows, unfinished: bool = False) -> common.Claims:
    """Of `gaps`. Args: unfinished: some trainings were not run."""
    closed = [row["closed"] for row in rows]
    claim = f"correlated noise closes {AIM:.0%} of the gap between independent noise and none"
    numbers = ", ".join(f"{share:.0%}" for share in closed) + f" in {len(rows)} groups"
    return [(claim, min(closed) >= AIM, numbers + "; some trainings were not run" * unfinished)]


CHECKS = {
    "correlated": check,
    "correlated_accounting": check_accounting,
    "correlated_training": check_training,
}
"""By the record."""
FIGURES = {"correlated": draw}


@common.mistakes()
def main() -> None:
    """All parts, from the command line to their files."""
    given = common.resumable(__doc__, "training")
    settings = SETTINGS[given.scale]
    if given.dry_run:
        print(f"about {num_trainings(settings)} trainings of {settings.num_steps} steps")
        print(common.last_time("correlated", given.scale))
        return
    out = common.out_of(given)
    where = (given.scale, out, settings)
    rows = errors(settings)
    figures = {"correlated": draw(rows)}
    common.finish("correlated", *where, rows, figures, check(rows), always=True)
    rows = agreement(settings)
    name = "correlated_accounting"
    common.finish(name, *where, rows, {}, check_accounting(rows), always=True)
    file = out / "correlated_training.jsonl"
    run(settings, file, given.minutes)
    trained = kept(file)
    if found := gaps(settings, trained):
        left = missing(cells(settings, trained), file)
        common.finish(
            "correlated_training",
            *where,
            found,
            {"correlated_training": draw_losses(found, settings.data)},
            check_training(found, bool(left)),
            data={settings.data: _fingerprint(settings)},
            model={"source": "tiny", "num_parameters": trained[0]["num_parameters"]},
            trainings=trained,
        )


def _fingerprint(settings: Settings) -> str:
    return corpora.load(source(settings), max_length=settings.max_length).train.fingerprint


if __name__ == "__main__":
    main()
