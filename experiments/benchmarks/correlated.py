"""Correlated noise: how much of a whole step it costs, beside independent noise.

    python -m experiments.benchmarks.correlated [--quick] [--json]   (three minutes; quick: 25 s)

Steps of ULS with a transformer of 5 M parameters and 8 bands: clipped gradients of the users drawn,
noise, the mean, momentum's update. Each step is run with both kinds of noise, from the same draws
and parameters, in turn; ratios are of these pairs, medians over steps. All is in one process, and
times are processor seconds, of all cores together. `noise_s` is of a step's noise alone.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.common import at_most, circumstances, parser_of
from fedsim.clipping import Clip, Strategy, lattice_bits, num_coordinates
from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.engine import keep_memory
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.noise import AddNoise, Correlated, add_gaussian
from fedsim.plan import method_for
from fedsim.run import find_model, load_data, make_task
from fedsim.training.optimizers import update_rule, updater

BANDS, STEPS, SIGMA, BUDGET = 8, 500, 1.0, 64
BOUND = 1.05


def whole_steps(repeats: int) -> dict[str, Any]:
    """A row: processor seconds of steps with each kind of noise, and the ratio of pairs."""
    run = run_config(
        data="pydocs",
        run_dir=Path("."),
        model="medium",
        max_length=64,
        engine="local",
        optimizer="momentum",
    )
    data = load_data(run.data, find_model(run.model.source), lambda text: None)
    privacy = PrivacyConfig(4.0, STEPS, BUDGET, group_size=1, noise="correlated", bands=BANDS)
    key = SecretKey.create(0)
    method = method_for(Algorithm.ULS, privacy, data.train, key)
    task, params = make_task(run, None, data, key.jax_key("parameters"))
    rule, engine = update_rule(run, 0.1), LocalEngine(task, num_lanes=1)
    update, state = updater(rule), rule.init(params)
    kinds: dict[str, AddNoise] = {
        "independent": add_gaussian,
        "correlated": Correlated(STEPS, BANDS),
    }
    settings = {"clip": Clip(1.0, normalised=True), "strategy": Strategy("direct", 8)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(BANDS - 1, BANDS + repeats):  # the first compiles, and draws all rows
        for kind in sorted(kinds, reverse=step % 2 == 1):
            started = time.process_time()
            own = {"noise_multiplier": SIGMA, "add_noise": kinds[kind]}
            noisy, _ = method.gradient(params, step, engine, **settings, **own)
            jax.block_until_ready(update(noisy.values(), state, params))
            seconds[kind].append(time.process_time() - started)
    size = num_coordinates(params)
    found: dict[str, Any] = {"numbers": size, "bands": BANDS, "budget": BUDGET}
    for kind, times in seconds.items():
        found[f"{kind}_s"] = statistics.median(times[1:])
    pairs = zip(seconds["correlated"][1:], seconds["independent"][1:], strict=True)
    found["ratio"] = statistics.median(one / other for one, other in pairs)
    found["noise_s"] = noise_alone(kinds, size, key, repeats)
    return found


def noise_alone(
    kinds: dict[str, AddNoise], size: int, key: SecretKey, repeats: int
) -> dict[str, float]:
    """Median processor seconds to add a step's noise."""
    sums, stddev = [np.zeros(size, np.int32)], SIGMA * 2.0 ** lattice_bits(size)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for step in range(BANDS - 1, BANDS + repeats):
        for kind, add in kinds.items():
            started = time.process_time()
            add(sums, stddev=stddev, key=key, step=step)
            seconds[kind].append(time.process_time() - started)
    return {kind: statistics.median(times[1:]) for kind, times in seconds.items()}


def main() -> None:
    """Measure and print."""
    arguments = parser_of(__doc__, "less of it").parse_args()
    keep_memory()
    row = whole_steps(3 if arguments.quick else 25)
    bars = [
        at_most("a step with correlated noise beside one with independent", row["ratio"], BOUND)
    ]
    if not arguments.json:
        for name, value in row.items():
            print(f"{name:14} {value}")
    print(json.dumps({**circumstances("numpy", "jax", "randomgen"), "rows": [row], "bars": bars}))


if __name__ == "__main__":
    main()
