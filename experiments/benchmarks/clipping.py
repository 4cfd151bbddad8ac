"""What clipping costs: every strategy, and jax_privacy, beside the best plain gradient of the rows.

    python -m experiments.benchmarks.clipping [--quick] [--json] [--sizes 1M 5M] [--groups 1 4]
                                                                   (an hour; quick: 2 min)

A cell is a transformer and a group size: G = 1 is ELS, more rows of a user are ULS. All rows have
the same 64 positions, so nothing is gained by buckets. `plain` is the sum of the rows' gradients
without any clipping, as JAX derives it, its micro-batch tuned, and `products` the same sum with the
layers' products of clipping/strategy.py; `masked` is a strategy on rows half of whose tokens are
trained on, to be compared with the same strategy on whole rows; `auto` is what a run would choose,
its lane computed as a worker computes it. jax_privacy runs in the same process, its micro-batch
tuned. Rows of Opacus and PyTorch in the record are of a script that docs/lab/performance.md names.

Everything runs on one thread, with the memory allocator set as in fedsim's workers, in turn; times
are processor seconds, ratios are medians over turns. Memory is what a compiled program needs beside
parameters and result.
"""

import functools
import os
import statistics
import sys
import time
from typing import Any

os.environ |= {"NPROC": "1", "JAX_PLATFORMS": "cpu"}  # before JAX starts its client

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.common import at_most, parser_of, write
from fedsim.clipping import Clip, clip_chunk, zeros_like
from fedsim.clipping.strategy import Strategy, in_one_product
from fedsim.config import EngineConfig
from fedsim.engine import Task, choose_strategy, keep_memory
from fedsim.engine.worker import LocalEngine
from fedsim.models import LanguageModelTask, Transformer, TransformerConfig

CLIP = Clip(1.0, normalised=True)
POSITIONS = 64
PLAIN_ROWS = {"1M": (2, 4, 8), "5M": (2, 4, 8), "17M": (2, 4, 8), "60M": (4, 8, 16)}
SIZES = {  # width, layers, vocabulary
    "1M": (128, 4, 2048),
    "5M": (256, 5, 4096),
    "17M": (512, 4, 8192),
    "60M": (768, 6, 22528),
}
GROUPS = (1, 4, 16, 64)
PEER_UNITS = (1, 4)
PRODUCT_ROWS = (4, 16)


class TokensTask(Task):
    """Random tokens; every row is full."""

    def __init__(self, size: str, num_rows: int):
        width, layers, vocabulary = SIZES[size]
        self.config = TransformerConfig(vocabulary, POSITIONS + 1, width, layers, width // 64)
        self.model = Transformer(self.config)
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(vocabulary, size=(num_rows, POSITIONS + 1), dtype=np.int32)

    def __repr__(self) -> str:
        return f"{self.config}"

    def init(self, key: jax.Array) -> Any:
        return self.model.init(key, jnp.asarray(self.tokens[:1]))["params"]

    def read(self, split: str, rows: np.ndarray) -> np.ndarray:
        return self.tokens[rows]

    def losses(self, params: Any, tokens: jax.Array, trained: Any = None) -> jax.Array:
        batch = {"tokens": tokens, "sizes": jnp.full(len(tokens), POSITIONS + 1)}
        batch |= {} if trained is None else {"trained": trained}
        return LanguageModelTask(None, self.config).losses(params, batch)

    def masked_losses(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Losses over the tokens with odd ids, as if a mask had them."""
        return self.losses(params, tokens, tokens % 2 == 1)


def plain(losses, rows_per_pass):
    """Sum of the rows' gradients."""

    def gradient(params, tokens):
        parts = tokens.reshape(-1, rows_per_pass, POSITIONS + 1)

        def add(total, part):
            grad = jax.grad(lambda p: losses(p, part).sum())(params)
            return jax.tree.map(jnp.add, total, grad), None

        return jax.lax.scan(add, zeros_like(params), parts)[0]

    return gradient


def ours(losses, group, strategy):
    """The clipped sum in one program."""

    def total(params, tokens):
        users = tokens.reshape(-1, group, POSITIONS + 1)
        mask = jnp.ones(users.shape[:2], bool)
        return clip_chunk(losses, params, users, mask, CLIP, strategy)

    return total


def jax_privacy(task, group, units):
    """Their clipped gradient of users of `group` rows."""
    from jax_privacy import clipped_grad

    def total(params, tokens):
        users = tokens.reshape(-1, group, POSITIONS + 1)
        return clipped_grad(
            lambda params, rows: task.losses(params, rows).mean(),
            l2_clip_norm=CLIP.norm,
            rescale_to_unit_norm=True,
            keep_batch_dim=False,
            microbatch_size=min(units, len(users)),
        )(params, users)

    return total


def strategies(group: int) -> list[Strategy]:
    """Strategies for users of `group` rows: parts of a user in a pass, or several users."""
    parts = {min(group, rows) for rows in (4, 16)}
    several = {rows for rows in (4, 8) if rows >= 2 * group}
    ghost = Strategy("ghost", group if group > 4 else 4 * group)
    scan = [Strategy("scan", rows) for rows in sorted(parts)]
    direct = [Strategy("direct", rows) for rows in sorted(parts | several)]
    return [*scan, *direct, ghost]


def cell(size: str, group: int, turns: int, peers: bool) -> dict[str, Any]:
    """One row of the table."""
    num_rows = max(32, group)
    task = TokensTask(size, num_rows)
    params, tokens = task.init(jax.random.key(0)), jnp.asarray(task.tokens)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    functions = {f"plain:{rows}": plain(task.losses, rows) for rows in PLAIN_ROWS[size]}
    functions |= {
        f"products:{rows}": plain(in_one_product(task.losses), rows) for rows in PRODUCT_ROWS
    }
    tried = strategies(group)
    functions |= {str(s): ours(task.losses, group, s) for s in tried}
    masked = {f"masked {s}": s for s in {s.name: s for s in tried}.values()}
    functions |= {name: ours(task.masked_losses, group, s) for name, s in masked.items()}
    if peers:
        for units in PEER_UNITS:
            functions[f"jax_privacy:{units}"] = jax_privacy(task, group, units)
    programs = {
        name: jax.jit(function).lower(params, tokens).compile()
        for name, function in functions.items()
    }
    memory = {name: temporary_mib(program) for name, program in programs.items()}
    calls: dict[str, Any] = {
        name: functools.partial(program, params, tokens) for name, program in programs.items()
    }
    calls["auto"], auto = automatic(task, params, num_rows, group)
    seconds = in_turn(calls, turns)
    best = min(
        (name for name in calls if name.startswith("plain")), key=lambda n: median(seconds[n])
    )
    ratios = {
        name: median([a / b for a, b in zip(times, seconds[best], strict=True)])
        for name, times in seconds.items()
    }
    of_masks = {
        name: median([a / b for a, b in zip(seconds[name], seconds[str(s)], strict=True)])
        for name, s in masked.items()
    }
    row = {"size": size, "parameters": count, "group": group, "rows": num_rows, "auto": auto}
    row |= {"best_plain": best, "plain_s": median(seconds[best]), "ratios": ratios}
    row |= {
        "masked": of_masks,
        "seconds": {name: median(times) for name, times in seconds.items()},
        "memory_mib": memory,
    }
    return row


def automatic(task, params, num_rows, group):
    """What a run would choose, and its lane as a worker computes it."""
    engine = LocalEngine(task, num_lanes=1)
    rows = np.arange(num_rows).reshape(-1, group)
    strategy = choose_strategy(engine, params, group, CLIP, EngineConfig())
    return lambda: engine.clipped_sum(params, rows, CLIP, strategy), str(strategy)


def in_turn(calls: dict[str, Any], turns: int) -> dict[str, list[float]]:
    """Processor seconds of each call in each turn; a turn before warms up. The order changes from
    turn to turn: a call leaves caches and heap as the next one finds them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    rng = np.random.default_rng(0)
    for turn in range(turns + 1):
        for name in rng.permutation(list(calls)).tolist():
            start = time.process_time()
            jax.block_until_ready(calls[name]())
            if turn:
                seconds[name].append(time.process_time() - start)
    return seconds


def temporary_mib(program) -> float:
    found = program.memory_analysis()
    return round(found.temp_size_in_bytes / 2**20, 1)


def median(values: list[float]) -> float:
    return statistics.median(values)


def bars(rows: list[dict]) -> list[dict]:
    masked = max(ratio for row in rows for ratio in row["masked"].values())
    large = [row["ratios"]["auto"] for row in rows if row["parameters"] > 4.5e6]
    against = [
        row["seconds"]["auto"] / min(times)
        for row in rows
        if (times := [s for n, s in row["seconds"].items() if n.startswith("jax_p")])
    ]
    found = [at_most("masked / unmasked rows of one strategy, most", masked, 1.05)]
    found += (
        [
            at_most("auto / best plain gradient, most, from 5 M parameters", max(large), 1.10),
            at_most("auto / best plain gradient, median, from 5 M parameters", median(large), 1.0),
        ]
        if large
        else []
    )
    if against:
        found.append(at_most("auto / fastest peer, most", max(against), 1.0))
    return found


def main() -> None:
    parser = parser_of(__doc__, "the smallest cells, without jax_privacy")
    parser.add_argument("--no-peers", action="store_true", help="leave jax_privacy out")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--groups", nargs="+", type=int, default=list(GROUPS))
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    keep_memory()  # as workers do
    if arguments.quick:
        arguments.sizes, arguments.groups, arguments.turns = ["1M"], [1, 16], 3
        arguments.no_peers = True
    rows = []
    for size in arguments.sizes:
        for group in arguments.groups:
            row = cell(size, group, arguments.turns, peers=not arguments.no_peers)
            rows.append(row)
            print(summary(row), file=sys.stderr, flush=True)
    write(bars(rows), ("fedsim", "jax", "flax", "numpy"), arguments.json, rows=rows)


def summary(row: dict) -> str:
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratios"].items())
    head = f"{row['size']} G {row['group']}: {row['best_plain']} {row['plain_s']:.3f} s"
    return f"{head}; auto = {row['auto']}; {ratios}"


if __name__ == "__main__":
    main()
