"""What a step costs on the accelerator that is there, and whether a run on it can be replayed.

    python -m experiments.benchmarks.accelerator [--quick] [--json] [--out FILE]
                                                      (ten minutes at most; quick: a minute)

It was run on one NVIDIA H100, whose rows are in results/benchmark_accelerator.json, and in its
quick form on a CPU. It needs no Ray.

A cell is a model, an algorithm and a group size. `plain` is a mini-batch gradient of as many rows,
without clipping, as many of them in a pass as is fastest; `ratio` is its seconds over those of a
clipped sum: 1 where clipping is free. `mfu` is the share of the device's peak in bfloat16: six
times parameters times tokens (with adapters four times) over seconds and peak. `at_once` is the
units of a pass: runs on an accelerator take one (docs/lab/accelerator.md), more say what that
costs. After seven minutes no cell is begun: what was not reached, and what the memory did not hold,
is listed under `skipped`. First comes a private run on made-up text, which is replayed bit by bit.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.common import at_least, circumstances
from fedsim.clipping import Clip, Strategy, clip_chunk, num_coordinates, zeros_like
from fedsim.clipping.scan import in_one_product
from fedsim.engine.environment import compiler_options
from fedsim.engine.programs import check_arithmetic
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.models import Transformer, TransformerConfig, lora, stacked
from fedsim.models.language_model import next_token_nats

CLIP = Clip(1.0, normalised=True)
LAST_S = 420.0  # a cell may take a minute to compile
PEAKS = {  # dense bfloat16 products a second, by what JAX calls the device
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}
SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "mlp_width": 1536, "norm": "rms", "mlp": "swiglu"}
SMOLLM2 |= {"positions": "rope", "rope_base": 1e5, "mlp_bias": False, "norm_epsilon": 1e-5}


@dataclasses.dataclass(frozen=True)
class Model:
    """A shape with random weights: what a step costs does not depend on them."""

    name: str
    config: TransformerConfig
    rank: int = 0
    rows: int = 64
    """Of a step."""


def models(quick: bool) -> list[Model]:
    if quick:
        return [
            Model("tiny", TransformerConfig(260, 17, 16, 2, 2, "bfloat16"), rows=4),
            Model("tiny, LoRA", TransformerConfig(260, 17, 16, 2, 2, "bfloat16"), 2, 4),
        ]
    paper = TransformerConfig(30_522, 129, 1024, 24, 16, "bfloat16")
    small = TransformerConfig(49_152, 129, 576, 30, dtype="bfloat16", **SMOLLM2)
    return [Model("350M", paper), Model("SmolLM2-135M, LoRA", small, 8)]


class Problem:
    """A model, its parameters on the device, and rows of random tokens."""

    def __init__(self, model: Model):
        config, key = model.config, jax.random.key(0)
        first = jnp.zeros((1, 2), jnp.int32)
        params = stacked(
            jax.tree.map(np.asarray, jax.jit(Transformer(config).init)(key, first)["params"]),
            config.num_layers,
        )
        self.size, self.frozen = num_coordinates(params), None
        if model.rank:
            self.frozen = jax.device_put(params)
            config = lora.adapted(config, model.rank, 16.0, "all")
            params = stacked(jax.tree.map(np.asarray, lora.init(config, key)), config.num_layers)
        self.params = jax.device_put(params)
        rng = np.random.default_rng(0)
        shape = (model.rows, config.max_length)
        self.tokens = jnp.asarray(rng.integers(config.vocab_size, size=shape, dtype=np.int32))
        self._model = Transformer(config)

    def losses(self, frozen: Any, params: Any, tokens: jax.Array) -> jax.Array:
        params = params if frozen is None else lora.joined(frozen, params)
        sizes = jnp.full(len(tokens), tokens.shape[1])
        nats, predictions = next_token_nats(self._model, params, tokens, sizes)
        return nats / predictions

    def plain(self, rows: int) -> Callable[..., Any]:
        """The mean gradient, so many rows at a time."""

        def gradient(frozen, params, tokens):
            losses = in_one_product(functools.partial(self.losses, frozen))

            def add(total, part):
                grad = jax.grad(lambda p: losses(p, part).sum())(params)
                return jax.tree.map(jnp.add, total, grad), None

            parts = tokens.reshape(-1, rows, tokens.shape[1])
            return jax.lax.scan(add, zeros_like(params), parts)[0]

        return gradient

    def clipped(self, group: int, strategy: Strategy) -> Callable[..., Any]:
        """The clipped sum over units of so many rows."""

        def total(frozen, params, tokens):
            units = tokens.reshape(-1, group, tokens.shape[1])
            mask = jnp.ones(units.shape[:2], bool)
            losses = functools.partial(self.losses, frozen)
            return clip_chunk(losses, params, units, mask, CLIP, strategy)

        return total

    def timed(self, function: Callable[..., Any], repeats: int) -> tuple[float, float, Any]:
        """(seconds, the median; GiB beside arguments and result; what it returns)."""
        arguments = (self.frozen, self.params, self.tokens)
        lowered = jax.jit(function).lower(*arguments)
        program = lowered.compile(compiler_options(jax.default_backend()))
        analysis = program.memory_analysis()
        found, seconds = jax.block_until_ready(program(*arguments)), []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds.append(time.perf_counter() - start)
        temporary = analysis.temp_size_in_bytes / 2**30 if analysis else 0.0
        return statistics.median(seconds), temporary, found


def rows_of(
    model: Model, quick: bool, left: Callable[[], bool], skipped: list[str]
) -> Iterator[dict[str, Any]]:
    """The cells of a model, for as long as time is left."""
    repeats, problem = 2 if quick else 5, Problem(model)
    peak = next((p for name, p in PEAKS.items() if name in jax.devices()[0].device_kind), None)
    tokens = model.rows * (model.config.max_length - 1)
    products = (4 if model.rank else 6) * problem.size * tokens

    def row(cell, seconds, gib, **more):
        found = {"model": model.name, "cell": cell, "seconds": seconds, "temporary_gib": gib}
        found |= {"gradients_per_s": model.rows / seconds, **more}
        return found | {"mfu": products / seconds / peak if peak else None}

    best = None
    for rows in (4,) if quick else (8, 16, 32, 64):
        if left():
            seconds, gib, _ = problem.timed(problem.plain(rows), repeats)
            best = seconds if best is None else min(best, seconds)
            yield row(f"plain:{rows}", seconds, gib)
    cells = [(f"ULS G={group}", group) for group in ((4,) if quick else (4, 16, 1))]
    total = None
    for cell, group in [*cells, ("ELS", 1)]:
        for rows in (4,) if quick else sorted({group, 16, 32}):
            if best is None or not left():
                continue
            strategy = Strategy("direct", rows)
            try:
                seconds, gib, found = problem.timed(problem.clipped(group, strategy), repeats)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                skipped.append(f"{model.name}, {cell}, {strategy}: memory")
                continue
            total = found[0]
            own = {"strategy": str(strategy), "at_once": strategy.units_at_once(group)}
            yield row(cell, seconds, gib, ratio=best / seconds, **own)
    if total is not None:
        own = {"clip": CLIP, "noise_multiplier": 1.0, "count": model.rows}
        start = time.perf_counter()
        fetched = jax.tree.map(np.asarray, total)
        between = time.perf_counter()
        noisy_mean(fetched, **own, key=SecretKey.create(0), step=0)
        end = time.perf_counter()
        times = {"fetch_s": between - start, "noise_s": end - between}
        yield {"model": model.name, "cell": "noise on the host", **times}


def private_run(quick: bool) -> dict[str, Any]:
    """A run on made-up text on this device, and whether it can be computed again, bit by bit."""
    from fedsim.config import Algorithm, PrivacyConfig, run_config
    from fedsim.run import Console
    from fedsim.training import train
    from fedsim.trust import verify

    with tempfile.TemporaryDirectory() as scratch:
        place, console = Path(scratch), Console()
        steps, budget = (2, 4) if quick else (20, 64)
        privacy = PrivacyConfig(epsilon=8.0, num_steps=steps, batch_size=budget, group_size=2)
        settings: dict[str, Any] = {"data": "pydocs", "engine": "local"}
        settings |= {"model": "micro" if quick else "small", "eval_examples": 8}
        settings |= {"strategy": "direct:2" if quick else "auto"}
        config = run_config(run_dir=place / "run", budget_ledger=place / "budget", **settings)
        start = time.perf_counter()
        summary = train(Algorithm.ULS, privacy, config, console)
        between = time.perf_counter()
        checks = verify(place / "run", again="whole", console=console)
        end = time.perf_counter()
    verdicts = {check.promise: check.verdict for check in checks}
    found = {"cell": "a private run", "epsilon": summary["epsilon"], "verify": verdicts}
    return found | {"train_s": between - start, "verify_s": end - between}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--out", type=Path, help="a file for the same object")
    given = parser.parse_args(arguments)
    start, device = time.monotonic(), jax.devices()[0]
    check_arithmetic(device)
    rows, skipped = [], []

    def left(what="cells of a model"):
        there = time.monotonic() - start < LAST_S
        if not there:
            skipped.append(what)
        return there

    def note(row):
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)

    note(private_run(given.quick))
    for model in models(given.quick):
        for row in rows_of(model, given.quick, functools.partial(left, model.name), skipped):
            note(row)
    stats = device.memory_stats() or {}
    found = circumstances("jax", "jaxlib", "flax", "numpy")
    found["machine"] |= {"device": device.device_kind, "platform": device.platform}
    found["machine"]["peak_gib"] = stats.get("peak_bytes_in_use", 0) / 2**30 or None
    found |= {"rows": rows, "skipped": skipped, "bars": bars(rows)}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.json:
        print(json.dumps(found))
    return found


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The aims for 350 M parameters, where they were measured on an accelerator."""
    own = [row for row in rows if row.get("model") == "350M" and row.get("mfu") is not None]
    own = [row for row in own if row.get("at_once", 1) == 1]
    ratios = [row["ratio"] for row in own if row["cell"] in ("ULS G=4", "ULS G=16")]
    shares = [row["mfu"] for row in own if row["cell"] in ("ULS G=4", "ULS G=16")]
    found = []
    if ratios:
        found.append(at_least("ULS, G >= 4: speed over that of a plain step", max(ratios), 0.95))
        found.append(at_least("ULS, G >= 4: share of the bfloat16 peak", max(shares), 0.4))
    return found


if __name__ == "__main__":
    main()
