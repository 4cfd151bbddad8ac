"""The accountant against dp_accounting as it is: seconds and epsilons, in one run.

    python -m experiments.benchmarks.accounting [--quick] [--json]   (25 minutes; quick: 7 s)

Settings: the paper's own (SETTINGS), and the grid of tests/accounting/recorded_epsilons.csv. For
each: dp_accounting at its default discretisation of 1e-4, fedsim on the same grid where it fits,
and fedsim as it is used, on an adaptive grid. fedsim's times are cold: no one-step loss is reused.
All are processor seconds, which other work on the machine disturbs little; both run on one core.

dp_accounting gets CAP_S processor seconds and CAP_BYTES of memory per setting, in a process of its
own. Where that is not enough (`capped`), its row counts with the seconds it had, so that the
speed-up is a lower bound.

dp_accounting's FFT runs in double precision and errs either way, by about 1e-15 per step in delta;
`wide` is the epsilon of its own one-step loss composed in extended precision, the fair comparison
where delta is tiny. The test suite holds 60 and more settings to the library as it is, rounding and
all, with G to 128, p from 1e-5 to 0.5, T to 10,000, sigma from 0.5 to 10 and delta from 1e-12 to
1e-3, against recorded epsilons on grids coarse enough for it (tests/accounting/test_accountant.py).
"""

import contextlib
import csv
import multiprocessing
import resource
import signal
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import dp_accounting
from dp_accounting import pld
from scipy import stats

from experiments.benchmarks.common import at_least, at_most, parser_of, write
from fedsim import accounting
from fedsim.accounting import StepEvent, accountant, composition

GRID = 1e-4
CAP_S = 30.0
CAP_BYTES = 8 * 2**30
RECORDED = Path(__file__).parents[2] / "tests" / "accounting" / "recorded_epsilons.csv"
WHOLE = ("max_contributions", "num_steps")
FIELDS = (*WHOLE, "noise_multiplier", "sampling_prob", "delta")

STACK_OVERFLOW = {"num_steps": 10_000, "delta": 1.13e-9}
CC_NEWS = {"num_steps": 2_000, "delta": 2.92e-8}
FIGURE_1 = {"num_steps": 2_000, "delta": 1e-6, "sampling_prob": 0.01}
STACK_OVERFLOW_USERS, CC_NEWS_USERS = 342_477, 87_590  # the paper assumes ten times CC-News's own

SETTINGS = {
    "Stack Overflow ELS": dict(
        STACK_OVERFLOW,
        noise_multiplier=0.86,
        sampling_prob=1024 / (128 * STACK_OVERFLOW_USERS),
        max_contributions=128,
    ),
    "Stack Overflow ULS": dict(
        STACK_OVERFLOW, noise_multiplier=0.81, sampling_prob=1024 / STACK_OVERFLOW_USERS
    ),
    "CC-News ELS": dict(
        CC_NEWS,
        noise_multiplier=1.01,
        sampling_prob=256 / (16 * CC_NEWS_USERS),
        max_contributions=16,
    ),
    "CC-News ULS": dict(CC_NEWS, noise_multiplier=0.8, sampling_prob=256 / CC_NEWS_USERS),
    "G 4, sigma 1": dict(FIGURE_1, noise_multiplier=1.0, max_contributions=4),
    "G 16, sigma 2": dict(FIGURE_1, noise_multiplier=2.0, max_contributions=16),
    "G 32, sigma 4": dict(FIGURE_1, noise_multiplier=4.0, max_contributions=32),
    "G 64, sigma 4": dict(FIGURE_1, noise_multiplier=4.0, max_contributions=64),
    "T 1, G 16, sigma 1": dict(
        num_steps=1, delta=1e-5, noise_multiplier=1.0, sampling_prob=0.01, max_contributions=16
    ),
    "p 0.2, G 8, sigma 10": dict(
        num_steps=100, delta=1e-3, noise_multiplier=10.0, sampling_prob=0.2, max_contributions=8
    ),
    "p 0.5, G 4, sigma 10": dict(
        num_steps=100, delta=1e-6, noise_multiplier=10.0, sampling_prob=0.5, max_contributions=4
    ),
}

CALIBRATIONS = {
    f"{name} epsilon {epsilon:g}": {
        key: value
        for key, value in {**SETTINGS[name], "epsilon": epsilon}.items()
        if key != "noise_multiplier"
    }
    for name in list(SETTINGS)[:4]
    for epsilon in (1.0, 4.0, 16.0)
}


def recorded_settings() -> dict[str, dict]:
    """The grid of settings that the tests compare with dp_accounting, by name."""
    settings = {}
    with RECORDED.open(newline="") as file:
        for row in csv.DictReader(file):
            name = ", ".join(f"{field} {row[field]}" for field in FIELDS)
            settings[name] = {f: (int if f in WHOLE else float)(row[f]) for f in FIELDS}
    return settings


def measure(setting: dict, peers: bool) -> dict:
    event, num_steps, delta = step_event(setting), setting["num_steps"], setting["delta"]
    phases, row = [(event, num_steps)], dict(setting)
    row["epsilon"], row["adaptive_s"] = timed(
        lambda: accounting.epsilon(phases, delta), repeats=3 if peers else 1
    )
    if not peers:
        return row
    row |= library(event, num_steps, delta)
    row["speedup"] = row["dp_accounting_s"] / row["adaptive_s"]
    try:
        row["same_grid_epsilon"], row["same_grid_s"] = timed(
            lambda: accounting.epsilon(phases, delta, discretization=GRID)
        )
    except composition.GridTooLargeError:
        return row
    row["same_grid_speedup"] = row["dp_accounting_s"] / row["same_grid_s"]
    # Above 700 e^-epsilon underflows, and dp_accounting's search with it.
    for key, name in (("off_library", "dp_accounting_epsilon"), ("off_wide", "wide_epsilon")):
        if 0 < row.get(name, 0) < 700:
            row[key] = row["same_grid_epsilon"] / row[name] - 1
    return row


def step_event(setting: dict) -> StepEvent:
    return StepEvent(
        setting["noise_multiplier"], setting["sampling_prob"], setting.get("max_contributions", 1)
    )


def library(event: StepEvent, num_steps: int, delta: float) -> dict:
    """dp_accounting's epsilons and seconds, or `capped` and the seconds it had."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_library, args=(event, num_steps, delta, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode != -signal.SIGPROF:
            raise RuntimeError(f"dp_accounting ended with {process.exitcode}") from None
        return {"capped": True, "dp_accounting_s": CAP_S}


def run_library(event: StepEvent, num_steps: int, delta: float, sender: Connection) -> None:
    """What PLDAccountant does, less its composition with nothing at all; then `wide`, untimed."""
    resource.setrlimit(resource.RLIMIT_AS, (CAP_BYTES, CAP_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CAP_S)
    start = time.process_time()
    try:
        step = library_step(event)
        epsilon = float(step.self_compose(num_steps).get_epsilon_for_delta(delta))
    except MemoryError:
        sender.send({"capped": True, "dp_accounting_s": time.process_time() - start})
        return
    seconds = time.process_time() - start
    signal.setitimer(signal.ITIMER_PROF, 0)
    result = {"capped": False, "dp_accounting_epsilon": epsilon, "dp_accounting_s": seconds}
    with contextlib.suppress(composition.GridTooLargeError):
        result["wide_epsilon"] = max(
            composition.pmf_epsilon_at(composition.compose_pmfs([(pmf, num_steps)]), delta)
            for pmf in composition.directions(step)
        )
    sender.send(result)


def dp_event_of(event: StepEvent) -> dp_accounting.DpEvent:
    """The same step as an event of dp_accounting: it knows no changed units and no allocation."""
    assert not event.allocated and not event.max_changed
    if event.max_contributions == 1:
        gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        return dp_accounting.PoissonSampledDpEvent(event.sampling_prob, gaussian)
    counts = range(event.max_contributions + 1)
    probs = stats.binom.pmf(counts, event.max_contributions, event.sampling_prob)
    return dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
        event.noise_multiplier, tuple(counts), tuple(probs.tolist())
    )


def library_step(event: StepEvent):
    """dp_accounting's own loss of one step."""
    losses = pld.privacy_loss_distribution
    if event.max_contributions == 1:
        return losses.from_gaussian_mechanism(
            event.noise_multiplier,
            sampling_prob=event.sampling_prob,
            value_discretization_interval=GRID,
        )
    dp_event = dp_event_of(event)
    assert isinstance(dp_event, dp_accounting.dp_event.MixtureOfGaussiansDpEvent)
    return losses.from_mixture_gaussian_mechanism(
        event.noise_multiplier,
        dp_event.sensitivities,
        dp_event.sampling_probs,
        value_discretization_interval=GRID,
    )


def timed(call: Callable[[], float], repeats: int = 3) -> tuple[float, float]:
    seconds, value = [], 0.0
    for _ in range(repeats):
        accountant._one_direction.cache_clear()
        start = time.process_time()
        value = call()
        seconds.append(time.process_time() - start)
    return value, statistics.median(seconds)


def calibrate(target: dict) -> dict:
    row = dict(target)
    row["noise_multiplier"], row["cold_s"] = timed(
        lambda: accounting.noise_multiplier(**target), repeats=1
    )
    return row


def bars(rows: list[dict], calibrations: list[dict], peers: bool) -> list[dict]:
    useful = [row["adaptive_s"] for row in rows if row["epsilon"] <= 100]
    found = [
        at_most("slowest epsilon <= 100, s", max(useful), 3.0),
        at_most("slowest cold calibration, s", max(r["cold_s"] for r in calibrations), 10.0),
    ]
    if peers:
        speedups = [row["speedup"] for row in rows]
        found.append(at_least("settings", len(rows), 60))
        found.append(at_least("median speed-up", statistics.median(speedups), 50))
        wide = [row["off_wide"] for row in rows if "off_wide" in row]
        exact = [r["off_library"] for r in rows if r["delta"] >= 1e-7 and "off_library" in r]
        for name, offs in (("wide", wide), ("dp_accounting, delta >= 1e-7", exact)):
            found.append(at_most(f"same grid, most below {name}", -min(offs), 1e-6))
            found.append(at_most(f"same grid, most above {name}", max(offs), 1e-4))
    return found


def main() -> None:
    arguments = parser_of(__doc__, "leave dp_accounting out").parse_args()
    rows, calibrations = [], []
    settings = {**SETTINGS, **recorded_settings()}
    for name, setting in settings.items():
        rows.append({"name": name, **measure(setting, peers=not arguments.quick)})
        print(summary(rows[-1]), file=sys.stderr)
    for name, target in list(CALIBRATIONS.items())[:: 4 if arguments.quick else 1]:
        calibrations.append({"name": name, **calibrate(target)})
        print(summary(calibrations[-1]), file=sys.stderr)
    found = bars(rows, calibrations, peers=not arguments.quick)
    packages = ("dp-accounting", "numpy", "scipy")
    write(found, packages, arguments.json, rows=rows + calibrations)


def summary(row: dict) -> str:
    shown = {key: value for key, value in row.items() if key.endswith(("_s", "epsilon", "speedup"))}
    return f"{row['name']}: " + ", ".join(f"{key} {value:.6g}" for key, value in shown.items())


if __name__ == "__main__":
    main()
