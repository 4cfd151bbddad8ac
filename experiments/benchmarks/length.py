"""What long rows take: memory of a clipped sum of rows of 2,048 and 4,096 tokens, and its time.

    python -m experiments.benchmarks.length [--quick] [--json] (10 minutes; quick: half of one)

Adapters of rank 8 on a small model of random weights in bfloat16 with SmolLM2's vocabulary, and the
whole of the same model; one thread. `chunked` has the loss in chunks of tokens, `whole` all logits
of a pass at once; a run chooses by size. `temp_mib` is what the compiled program needs beside its
arguments, `peak_mib` the largest memory of a process that computes one sum, JAX and all, and
`chunked_to_whole` the ratio of processor seconds where both were run in turn. M users of G rows are
to take no more than one user of one row.
"""

import argparse
import functools
import itertools
import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from experiments.benchmarks.clipping import as_a_worker, in_turn, median, temporary_mib
from experiments.benchmarks.common import at_most, parser_of, peak_mib, write
from fedsim.clipping import Clip, Strategy, clip_chunk
from fedsim.models import (
    LanguageModelTask,
    TransformerConfig,
    frozen,
    language_model,
    lora,
    stacked,
    weights,
)

PARTS: dict[str, Any] = {"num_kv_heads": 1, "norm": "rms", "positions": "rope", "mlp": "swiglu"}
PARTS |= {"mlp_bias": False}
CONFIGS = {
    True: TransformerConfig(4096, 128, 32, 2, 2, **PARTS),
    False: TransformerConfig(49_152, 4096, 256, 4, 4, **PARTS),
}
LENGTHS = {True: (128,), False: (2048, 4096)}
REMAT = {True: (True,), False: (False, True)}
TRAINED = ("adapters", "model")
SHAPES = ((1, 1), (4, 4))  # M users of G rows
FLAT, AS_FAST = 1.1, 1.05


class Problem:
    """A clipped sum of random rows: a function and its arguments."""

    def __init__(
        self, config: TransformerConfig, length: int, trained: str, shape: tuple[int, int]
    ):
        rng, key, (users, group) = np.random.default_rng(0), jax.random.key(0), shape
        layers, shapes = config.num_layers, weights.shapes_of(config)
        leaves = {path: rng.normal(0, 0.02, s).astype(np.float32) for path, s in shapes.items()}
        params: Any = traverse_util.unflatten_dict(leaves)
        self.weights: tuple[Any, ...] = ()
        if trained == "adapters":
            self.weights = (stacked(frozen.as_frozen(params, "bfloat16"), layers),)
            config = lora.adapted(config, 8, 16.0)
            params = lora.init(config, key)
        self.task = LanguageModelTask(None, config)  # pyright: ignore
        self.params = stacked(params, layers)
        self.chunk = min(language_model.CHUNK_LOGITS, length * config.vocab_size // 4)
        rows = rng.integers(config.vocab_size, size=(users, group, length + 1), dtype=np.int32)
        self.batch = {"tokens": rows, "sizes": np.full(rows.shape[:2], length + 1, np.int32)}

    def compiled(self, chunked: bool) -> Any:
        """The compiled program; call it with `arguments`."""

        def total(params, batch, *weights):
            losses = functools.partial(self._losses, weights)
            mask, clip = jnp.ones(batch["sizes"].shape, bool), Clip(1.0, normalised=True)
            return clip_chunk(losses, params, batch, mask, clip, Strategy("direct", 1))[0]

        sizes: Any = {"WHOLE_LOGITS": 0 if chunked else sys.maxsize, "CHUNK_LOGITS": self.chunk}
        with mock.patch.multiple(language_model, **sizes):
            return jax.jit(total).lower(*self.arguments).compile()

    def _losses(self, weights, params, rows):
        return self.task.losses(params, rows, *weights)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Parameters, rows and frozen weights."""
        return self.params, self.batch, *self.weights


def configured(quick: bool, length: int, remat: bool) -> TransformerConfig:
    return TransformerConfig(
        **{**vars(CONFIGS[quick]), "max_length": length + 1, "remat": remat}  # all are plain fields
    )


def row(quick: bool, length: int, trained: str, remat: bool, chunked: bool) -> dict[str, Any]:
    """Memory of one program, by M and G."""
    config, found = configured(quick, length, remat), {}
    for shape in SHAPES:
        program = Problem(config, length, trained, shape).compiled(chunked)
        found["M {} G {}".format(*shape)] = temporary_mib(program)
    about = {"length": length, "trained": trained, "remat": remat, "chunked": chunked}
    return {**about, "temp_mib": found}


def ratio(quick: bool, length: int, trained: str, turns: int) -> float:
    """Seconds of the chunked loss to those of the whole one: the median of ratios in turn."""
    problem = Problem(configured(quick, length, True), length, trained, (1, 1))
    programs = {name: problem.compiled(name == "chunked") for name in ("chunked", "whole")}
    calls = {n: functools.partial(each, *problem.arguments) for n, each in programs.items()}
    seconds = in_turn(calls, turns)
    return median([a / b for a, b in zip(seconds["chunked"], seconds["whole"], strict=True)])


def peak_of_process(quick: bool, length: int, shape: tuple[int, int]) -> float:
    """Peak memory of a process that computes a sum of adapters' gradients, as a run would."""
    command = [sys.executable, "-m", __spec__.name, "--one", str(length), *map(str, shape)]
    done = subprocess.run(command + ["--quick"] * quick, capture_output=True, text=True, check=True)
    return float(done.stdout)


def one(quick: bool, length: int, *shape: int) -> None:
    """Compute a sum, and print the peak memory of this process."""
    problem = Problem(configured(quick, length, True), length, "adapters", (shape[0], shape[1]))
    jax.block_until_ready(problem.compiled(chunked=True)(*problem.arguments))
    print(peak_mib())


def bars(rows: list[dict[str, Any]], peaks: dict[str, Any], ratios: dict[str, float]):
    chunked = [r["temp_mib"] for r in rows if r["chunked"]]  # as a run has such rows
    grown = max(max(found.values()) / found["M 1 G 1"] for found in chunked)
    found = [at_most("chunked program, most of M and G / one row, most", grown, FLAT)]
    for length, by_shape in peaks.items():
        first, *others = by_shape.values()
        found.append(
            at_most(f"process, {length} tokens, most / one row", max(others) / first, FLAT)
        )
    worst = max(ratios.values())
    return [*found, at_most("chunked / whole loss, seconds of a sum, most", worst, AS_FAST)]


def main() -> None:
    parser = parser_of(__doc__, "a tiny model and short rows")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    as_a_worker(__spec__.name)
    if given.one:
        one(given.quick, *given.one)
        return
    lengths, rows = LENGTHS[given.quick], []
    peaks: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    trained = TRAINED[:1] if given.quick else TRAINED
    cells: Any = itertools.product(lengths, trained, REMAT[given.quick])
    for length, kind, remat in cells:
        rows += [row(given.quick, length, kind, remat, chunked) for chunked in (False, True)]
        print(*rows[-2:], sep="\n", file=sys.stderr, flush=True)
    for length in lengths:
        own = {"M {} G {}".format(*s): peak_of_process(given.quick, length, s) for s in SHAPES}
        peaks[str(length)] = own
        for kind in trained:
            ratios[f"{length} {kind}"] = ratio(given.quick, length, kind, given.turns)
    for line in (peaks, ratios):
        print(line, file=sys.stderr)
    measured = {"rows": rows, "peak_mib": peaks, "chunked_to_whole": ratios}
    packages = ("fedsim", "jax", "flax", "numpy")
    write(bars(rows, peaks, ratios), packages, given.json, **measured)


if __name__ == "__main__":
    main()
