"""How fast texts are sampled: many at a time against one at a time and against transformers.

    python -m experiments.benchmarks.decoding [--quick] [--json] [--no-peers]     (8 minutes)

SmolLM2-135M's shape with random weights, from the begin token on, float32, one thread; processor
seconds. `rate` is the share of the machine's rate of matrix products (1,024 cubed) that the
products of the generated tokens reach. transformers' `generate` runs on PyTorch in an environment
of its own, with the product library as it starts.
"""

import os
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.accelerator import SMOLLM2
from experiments.benchmarks.clipping import as_a_worker
from experiments.benchmarks.common import at_least, parser_of, write
from experiments.benchmarks.peers import run
from fedsim.clipping import num_coordinates
from fedsim.config import Sampling
from fedsim.models import Decoder, Prompt, Transformer, TransformerConfig

LENGTH = 128
QUICK = {**SMOLLM2, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 96}
CONFIGS = {
    True: TransformerConfig(260, LENGTH, 32, 2, **QUICK),
    False: TransformerConfig(49_152, LENGTH, 576, 30, **SMOLLM2),
}
SIZES = {True: (1, 8), False: (1, 32, 64)}
TOKENS = {True: 16, False: 96}
SIDE = 1024  # of the matrices that measure the machine


def product_rate() -> float:
    """Floating-point operations per processor second of a large matrix product."""
    side = jax.random.normal(jax.random.key(0), (SIDE, SIDE))
    multiply = jax.jit(jnp.matmul)
    multiply(side, side).block_until_ready()
    start = time.process_time()
    for _ in range(8):
        multiply(side, side).block_until_ready()
    return 8 * 2 * SIDE**3 / (time.process_time() - start)


def seconds_by_size(
    config: TransformerConfig, params: Any, tokens: int, turns: int, sizes: tuple[int, ...]
) -> dict[int, float]:
    """Processor seconds for a batch of each size."""
    decoder, key = Decoder(config, params, Sampling(), ()), jax.random.key(0)

    def once(size: int) -> float:
        prompts = [Prompt([1], tokens, number) for number in range(size)]
        start = time.process_time()
        texts = dict(decoder.texts(prompts, key, slots=size, length=LENGTH))
        assert all(len(text) == tokens for text in texts.values())
        return time.process_time() - start

    times = {size: [once(size) for _ in range(turns + 1)][1:] for size in sizes}
    return {size: statistics.median(own) for size, own in times.items()}


def main() -> None:
    parser = parser_of(__doc__, "a tiny model, without peers")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    os.environ["NPROC"] = "1"
    as_a_worker(__spec__.name)
    config, sizes, tokens = CONFIGS[given.quick], SIZES[given.quick], TOKENS[given.quick]
    params = Transformer(config).init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))[
        "params"
    ]
    rate, parameters = product_rate(), num_coordinates(params)
    ours = seconds_by_size(config, params, tokens, given.turns, sizes)
    theirs: dict[int, float] = {}
    if not (given.quick or given.no_peers):
        printed = run.decoding(config, tokens, given.turns, *sizes)
        theirs = {int(size): seconds for size, seconds in printed.items()}
    rows = []
    for size in sizes:
        row = {"batch": size, "tokens_per_second": size * tokens / ours[size]}
        row |= {"times_one_at_a_time": size * ours[sizes[0]] / ours[size]}
        row |= {"rate": 2 * parameters * size * tokens / ours[size] / rate}
        if theirs:
            row |= {"transformers_per_second": size * tokens / theirs[size]}
            row |= {"times_transformers": theirs[size] / ours[size]}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    bars = [
        at_least(f"times transformers, batch {row['batch']}", row["times_transformers"], 1.0)
        for row in rows
        if theirs and row["batch"] > 1
    ]
    bars += [at_least(f"rate, batch {row['batch']}", row["rate"], 0.6) for row in rows[1:]]
    packages = ("fedsim", "jax", "flax", "numpy")
    write(bars, packages, given.json, product_gflops=rate / 1e9, rows=rows)


if __name__ == "__main__":
    main()
