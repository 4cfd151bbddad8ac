"""What clipping costs with LoRA: gradients of adapters of rank 8 on SmolLM2-135M's shape.

    python -m experiments.benchmarks.lora [--quick] [--json] [--no-peers]     (15 minutes)

Random weights, texts of 128 tokens, float32, one thread; processor seconds. `plain` is the gradient
of the same rows as JAX derives it, `products` with the layers' products in fedsim's order, so many
rows at a time. `peft` is the plain gradient by PyTorch, transformers and PEFT, which are installed
into an environment of their own.
"""

import functools
import sys
from contextlib import closing
from typing import Any

import jax

from experiments.benchmarks.accelerator import (
    SMOLLM2,
    Cell,
    Model,
    Problem,
    clipped_sum,
    plain_gradient,
)
from experiments.benchmarks.clipping import (
    as_a_worker,
    in_turn,
    median,
    strategies,
    temporary_mib,
)
from experiments.benchmarks.common import at_most, parser_of, write
from experiments.benchmarks.peers import run
from fedsim.clipping import num_coordinates
from fedsim.models import TransformerConfig

BOUND = 1.05
QUICK = {**SMOLLM2, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 96}
MODELS = {
    True: Model("tiny", TransformerConfig(260, 17, 32, 2, **QUICK), 2),
    False: Model("SmolLM2-135M", TransformerConfig(49_152, 128, 576, 30, **SMOLLM2), 8),
}
ROWS = {True: 4, False: 8}


def cells(model: Model, turns: int, quick: bool) -> list[dict[str, Any]]:
    """A row for examples, and one for users of four rows.

    Args: quick: all rows of plain gradients in one pass, and two strategies; compiling takes
      longest.
    """
    problem, length, in_all = Problem(model), model.config.max_length - 1, ROWS[quick]
    arguments, losses = problem.arguments(Cell(length, in_all, in_all)), problem.losses(length)
    count, found = num_coordinates(problem.params), []
    passes = [rows for rows in (1, 2, 4, 8) if rows <= in_all][-1 if quick else 0 :]
    plains = {f"plain:{rows}": plain_gradient(losses, rows, ordered=False) for rows in passes}
    plains |= {f"products:{rows}": plain_gradient(losses, rows) for rows in passes}

    def compiled(functions):
        return {n: jax.jit(each).lower(*arguments).compile() for n, each in functions.items()}

    plain_programs = compiled(plains)
    for group in (1, 4):
        tried = {str(each): each for each in strategies(group)[: 2 if quick else None]}
        clipped = {n: clipped_sum(losses, group, each) for n, each in tried.items()}
        programs = plain_programs | compiled(clipped)
        calls = {n: functools.partial(each, *arguments) for n, each in programs.items()}
        times = {name: median(own) for name, own in in_turn(calls, turns).items()}
        best = min((n for n in times if n.startswith("plain")), key=lambda name: times[name])
        ours = min(tried, key=lambda name: times[name])
        row = {"model": model.name, "parameters": problem.size, "adapters": count, "group": group}
        row |= {"rows": in_all, "best_plain": best, "best_clipped": ours, "seconds": times}
        row |= {"ratio": times[ours] / times[best]}
        row["memory_mib"] = {name: temporary_mib(each) for name, each in programs.items()}
        found.append(row)
        print(group, best, ours, f"{row['ratio']:.3f}", times, file=sys.stderr, flush=True)
    return found


def peft(model: Model, rows: int, turns: int) -> dict[str, float]:
    """Processor seconds of PEFT's plain gradient of as many rows, by rows of a pass."""
    sizes, passes = [model.config.max_length] * rows, [n for n in (1, 2, 4, 8) if n <= rows]
    with closing(run.Adapters(model.config, model.rank, sizes, {"plain": passes})) as peer:
        calls = {f"peft:{n}": functools.partial(peer.seconds, f"plain:{n}") for n in passes}
        return {name: median(seconds) for name, seconds in in_turn(calls, turns).items()}


def main() -> None:
    parser = parser_of(__doc__, "a tiny model, without peers")
    parser.add_argument("--no-peers", action="store_true", help="leave PEFT out")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    as_a_worker(__spec__.name)
    model = MODELS[given.quick]
    rows = cells(model, given.turns, given.quick)
    if not (given.quick or given.no_peers):
        rows[0]["seconds"] |= peft(model, ROWS[False], given.turns)
    found = [
        at_most(f"clipped / plain, adapters, {row['group']} rows of a user", row["ratio"], BOUND)
        for row in rows
    ]
    write(found, ("fedsim", "jax", "flax", "numpy"), given.json, rows=rows)


if __name__ == "__main__":
    main()
