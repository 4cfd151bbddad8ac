"""How much of the machine's rate of products a real model reaches on real texts' lengths.

    python -m experiments.benchmarks.short_texts [--quick] [--json]      (10 minutes)

Adapters of rank 8 on SmolLM2-135M's shape, random weights, one thread, processor seconds, as many
lanes as in a run. The 32 texts are as long as those of court transcripts are in its tokens, half of
them 25 tokens or fewer. A gradient counts as four products for each parameter and real token (with
adapters the weights have no gradient), a loss as two; padding counts as nothing. The rate of
products is that of square matrices of 1,024 float32.
"""

import argparse
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.accelerator import SMOLLM2
from experiments.benchmarks.clipping import as_a_worker, in_turn, median
from experiments.benchmarks.common import at_least, circumstances
from fedsim.clipping import Clip, Strategy, num_coordinates
from fedsim.config import EngineConfig
from fedsim.engine.worker import LocalEngine
from fedsim.models import LanguageModelTask, Transformer, TransformerConfig, lora, stacked

BOUND = 0.6
LENGTHS = (7, 8, 9, 10, 11, 12, 12, 14, 15, 16, 17, 18, 20, 21, 22, 24)
LENGTHS += (25, 26, 27, 29, 30, 32, 35, 37, 40, 46, 51, 56, 61, 69, 78, 89)
"""Quantiles of one text of each user of scotus, in tokens."""
SIZE = 1024
LANES = EngineConfig().num_lanes
STRATEGIES = ("scan:1", "direct:4", "direct:8")
QUICK = {**SMOLLM2, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 96}
CONFIGS = {
    True: TransformerConfig(260, 128, 32, 2, **QUICK),
    False: TransformerConfig(49_152, 128, 576, 30, **SMOLLM2),
}


class Texts(LanguageModelTask):
    """Random tokens, in texts of these lengths."""

    def sizes(self, split: str, rows: np.ndarray) -> np.ndarray:
        """Example i has the i-th length in an order that is drawn; padding has no tokens."""
        lengths = np.random.default_rng(1).permutation(LENGTHS)
        return np.where(rows < 0, 0, lengths[rows])

    def read(self, split: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Random tokens, as many as there are."""
        longest, sizes = self.config.max_length, self.sizes(split, rows)
        rng = np.random.default_rng(0)
        every = rng.integers(1, self.config.vocab_size, (len(LENGTHS), longest), np.int32)
        there = np.arange(longest) < sizes[:, None]
        return {"tokens": np.where(there, every[rows], 0), "sizes": sizes.astype(np.int32)}


def shares(config: TransformerConfig, strategies: list[str], turns: int) -> dict[str, Any]:
    """Seconds of everything, and shares of the rate of products."""
    key, first = jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    frozen = jax.tree.map(np.asarray, jax.jit(Transformer(config).init)(key, first)["params"])
    frozen = stacked(frozen, config.num_layers)
    adapted = lora.adapted(config, 8, 16.0)
    task = Texts(None, adapted, frozen=frozen)  # pyright: ignore
    params = stacked(jax.tree.map(np.asarray, lora.init(adapted, key)), config.num_layers)
    engine, rows = LocalEngine(task, num_lanes=LANES), np.arange(len(LENGTHS))[:, None]
    square = jax.random.normal(key, (SIZE, SIZE))
    product = jax.jit(lambda a: jax.lax.fori_loop(0, 20, lambda _, b: a @ b / SIZE, a))
    calls: dict[str, Any] = {"products": lambda: product(square)}
    for name in strategies:
        arguments = (params, rows, Clip(1.0, normalised=True), Strategy.parse(name))
        calls[name] = functools.partial(engine.clipped_sum, *arguments)
    calls["evaluation"] = lambda: engine.mean_nats(params, "train", rows[:, 0])
    seconds = {name: median(own) for name, own in in_turn(calls, turns).items()}
    rate = 20 * 2 * SIZE**3 / seconds["products"]
    tokens, size = sum(LENGTHS), num_coordinates(frozen)
    least = {name: 4 * size * tokens / rate for name in strategies}
    least["evaluation"] = 2 * size * tokens / rate
    found = {name: own / seconds[name] for name, own in least.items()}
    row = {"parameters": size, "adapters": num_coordinates(params), "tokens": tokens}
    return {**row, "gflops": rate / 1e9, "seconds": seconds, "shares": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, one strategy")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    as_a_worker(__spec__.name)
    if given.quick:  # every length is compiled for every strategy
        given.strategies, given.turns = ["direct:4"], 1
    found = shares(CONFIGS[given.quick], given.strategies, given.turns)
    best = max(given.strategies, key=lambda name: found["shares"][name])
    bars = [
        at_least(f"clipped sum of 32 texts, {best}", found["shares"][best], BOUND),
        at_least("loss of 32 texts", found["shares"]["evaluation"], BOUND),
    ]
    for line in (found, *bars):
        print(line, file=sys.stderr)
    if given.json:
        facts = circumstances("fedsim", "jax", "flax", "numpy")
        print(json.dumps({**facts, **found, "bars": bars}))


if __name__ == "__main__":
    main()
