"""Noise on the driver, or by workers that are trusted with it: processor seconds of the driver.

    python -m experiments.benchmarks.held_noise [--quick] [--json]

Two processes of `--engine spmd` on this machine, a sum of so many whole numbers, both ways in turn:
what the driver spends from asking for the sum to having what is released. The bits must be equal.
Workers of one machine share its processors, so the time that passes says nothing of other hosts.
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.common import at_most, circumstances
from fedsim.clipping import Clip, Strategy
from fedsim.engine.spmd_engine import SpmdEngine
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.models.mean import MeanTask

USERS, WORKERS = 4, 2
CLIP = Clip(1.0, normalised=True)


def measure(size: int, repeats: int) -> dict[str, Any]:
    """Medians over turns; the first one compiles and is left out."""
    points = np.random.default_rng(0).standard_normal((USERS, size), np.float32)
    engine = SpmdEngine(MeanTask(points), num_lanes=1, num_workers=WORKERS, threads=1)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    key, params, rows = SecretKey.create(), jax.numpy.zeros(size), np.arange(USERS)[:, None]
    same = True
    engine.ready()
    for step in range(repeats + 1):
        released = []
        for engine.trusted in seconds:
            started = time.process_time()
            total, _ = engine.clipped_sum(params, rows, CLIP, Strategy("scan"))
            own = {"clip": CLIP, "noise_multiplier": 1.0, "count": USERS, "key": key, "step": step}
            released.append(noisy_mean(total, **own).numbers)
            seconds[engine.trusted].append(time.process_time() - started)
        same &= np.array_equal(*released)
    engine.close()
    driver, workers = (statistics.median(seconds[trusted][1:]) for trusted in (False, True))
    return {
        "numbers": size,
        "on_driver_s": driver,
        "by_workers_s": workers,
        "ratio": workers / driver,
        "same_bits": bool(same),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    row = measure(2**21, 3) if arguments.quick else measure(20_000_000, 5)
    bars = [at_most("the driver's processor seconds, beside noise of its own", row["ratio"], 1.0)]
    if not arguments.json:
        print(f"{row['numbers']:,} numbers: {row['on_driver_s']:.3f} s on the driver, ", end="")
        print(f"{row['by_workers_s']:.3f} s with workers; same bits: {row['same_bits']}")
    print(json.dumps({**circumstances("numpy", "ray", "jax"), "rows": [row], "bars": bars}))


if __name__ == "__main__":
    main()
