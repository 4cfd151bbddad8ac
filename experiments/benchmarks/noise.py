"""Noise for the sum of one step: how long drawing, adding, rounding and dividing take.

    python -m experiments.benchmarks.noise [--quick] [--json]   (a minute; quick: 8 s)

Beside the way of fedsim (AES-128 in counter mode, whole numbers, tails drawn again, a public
lattice), the same from Philox, and what fedsim 0.2 did: Philox, floating-point numbers, rounded
once. All on all cores, block by block, in turns, medians; ratios are taken pair by pair.
"""

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from experiments.benchmarks.common import at_most, parser_of, write
from fedsim.clipping import Clip, lattice_bits
from fedsim.engine import keep_memory
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.noise import independent
from fedsim.noise.independent import BLOCK

PAPER = 350_000_000  # parameters of the paper's model
SIZES = {"124 K": 124_000, "5 M": 5_000_000, "350 M": PAPER}
QUICK = {"124 K": 124_000, "5 M": 5_000_000}
CLIP, SIGMA, COUNT = Clip(1.0, normalised=True), 1.0, 1024.0


class PhiloxKey(SecretKey):
    """Streams from NumPy's Philox, as fedsim 0.2 had them, but for the derivation of keys."""

    def generator(self, purpose: str, *index: int) -> np.random.Generator:
        """A generator for one purpose and index."""
        key = int.from_bytes(self._derive(purpose, index), "little")
        return np.random.Generator(np.random.Philox(key=key))


def ours(total: np.ndarray, key: SecretKey, step: int) -> np.ndarray:
    """The privatised gradient of whole numbers, float32."""
    how = {"clip": CLIP, "noise_multiplier": SIGMA, "count": COUNT}
    return noisy_mean(total, **how, key=key, step=step).values()


def in_floats(total: np.ndarray, key: SecretKey, step: int) -> np.ndarray:
    """(sum + N(0, sigma^2)) / count of float32 numbers, rounded once."""
    mean = np.empty(total.shape, np.float32)

    def fill(number: int) -> None:
        part = slice(number * BLOCK, (number + 1) * BLOCK)
        noisy = key.generator("noise", step, 0, number).standard_normal(len(total[part]))
        noisy *= SIGMA
        noisy += total[part]
        np.divide(noisy, COUNT, out=mean[part], casting="same_kind")

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(fill, range(-(-total.size // BLOCK))))
    return mean


def measure(name: str, size: int, repeats: int) -> dict[str, Any]:
    """A row of medians in seconds, and of ratios to what fedsim 0.2 did."""
    rng, secret = np.random.default_rng(0), bytes(range(32))
    whole = rng.integers(-(2**20), 2**20, size, np.int32)
    floats = whole.astype(np.float32) * np.float32(2.0 ** -lattice_bits(size))
    ways: dict[str, Callable[[int], Any]] = {
        "ours": lambda step: ours(whole, SecretKey(secret), step),
        "philox": lambda step: ours(whole, PhiloxKey(secret), step),
        "in_floats": lambda step: in_floats(floats, PhiloxKey(secret), step),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(repeats + 1):
        for way, run in ways.items():
            started = time.perf_counter()
            run(step)
            seconds[way].append(time.perf_counter() - started)
    kept = {way: times[1:] for way, times in seconds.items()}  # the first ones get memory
    row: dict[str, Any] = {"name": name, "numbers": size}
    row |= {f"{way}_s": statistics.median(times) for way, times in kept.items()}
    for way in ("philox", "in_floats"):
        pairs = zip(kept["ours"], kept[way], strict=True)
        row[f"ours_over_{way}"] = statistics.median(a / b for a, b in pairs)
    row["ns_a_number"] = row["ours_s"] / size * 1e9
    return row


def draws() -> dict[str, float]:
    """Nanoseconds of one thread for a normal number, by generator; ours draws tails again."""
    count, found = BLOCK, {}
    room = np.empty(count)
    for name, key in (("aes", SecretKey(bytes(32))), ("philox", PhiloxKey(bytes(32)))):
        rng, times = key.generator("noise", 0), []
        for _ in range(7):
            started = time.perf_counter()
            independent.gaussian(rng, room)
            times.append(time.perf_counter() - started)
        found[name] = statistics.median(times) / count * 1e9
    return found


def main() -> None:
    """Measure and print."""
    arguments = parser_of(__doc__, "less of it").parse_args()
    keep_memory()
    sizes = QUICK if arguments.quick else SIZES
    rows = [measure(name, size, 3 if size == PAPER else 9) for name, size in sizes.items()]
    one = draws()
    bars = [at_most("a normal number from AES beside Philox", one["aes"] / one["philox"], 1.0)]
    for row in rows:
        if row["numbers"] == PAPER:
            bars.append(at_most("seconds for 350 M numbers", row["ours_s"], 3.0))
    write(bars, ("numpy", "randomgen"), arguments.json, rows=rows, draws_ns=one)


if __name__ == "__main__":
    main()
