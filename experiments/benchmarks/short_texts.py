"""How fast a real model's clipped sums are on real texts' lengths, and how fast peers are.

    python -m experiments.benchmarks.short_texts [--whole] [--quick] [--json] [--no-peers]
                                                                                     (25 minutes)

Adapters of rank 8 on SmolLM2-135M's shape, or with --whole all of its weights, which are random;
one thread, processor seconds, as many lanes as in a run. The 32 texts are as long as those of court
transcripts are in its tokens, half of them 25 tokens or fewer; users of several texts have four of
them each.

`share` is the share of the machine's rate of products that is reached. For each parameter and real
token a gradient counts as four operations with adapters, whose weights have no gradient, as six
where all weights have one, and a loss as two; padding counts as nothing. The rate is that of square
matrices of 1,024 float32.

Plain gradients of the same texts by JAX and by PyTorch with PEFT, and clipped sums by jax_privacy,
Opacus (hooks and ghost clipping) and opake take the texts in order of length, in passes padded to
the longest. Of each, the number of texts of a pass that was best in a trial counts, as fedsim's
best strategy does. Opacus's ghost clipping refuses tied weights, so its head has weights of its own
with --whole. PyTorch multiplies with MKL as it starts, and at full speed
(`peers.run.mkl_says_intel`, which a C compiler makes), with --whole at full speed alone. What was
best is timed in turn in one process, then each peer's on PyTorch: memory has no room for the models
of all.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.accelerator import SMOLLM2
from experiments.benchmarks.clipping import in_turn, median, temporary_mib
from experiments.benchmarks.common import at_least, at_most, parser_of, write
from experiments.benchmarks.peers import run
from fedsim.clipping import Clip, Strategy, num_coordinates
from fedsim.config import EngineConfig
from fedsim.engine.environment import keep_memory
from fedsim.engine.worker import LocalEngine
from fedsim.models import LanguageModelTask, Transformer, TransformerConfig, lora, stacked

SHARE = 0.6
LENGTHS = (7, 8, 9, 10, 11, 12, 12, 14, 15, 16, 17, 18, 20, 21, 22, 24)
LENGTHS += (25, 26, 27, 29, 30, 32, 35, 37, 40, 46, 51, 56, 61, 69, 78, 89)
"""Quantiles of one text of each user of scotus, in tokens."""
SIZE, TIMES = 1024, 20  # of matrices, and of their products
RANK, ALPHA = 8, 16.0
LANES = EngineConfig().num_lanes
CLIP = Clip(1.0, normalised=True)
EXAMPLES, USERS = "fedsim, examples", "fedsim, users of four texts"
GROUPS = {EXAMPLES: 1, USERS: 4}
STRATEGIES = {EXAMPLES: ("scan:1", "direct:4"), USERS: ("scan:4", "direct:1", "direct:4")}
WHOLE = {EXAMPLES: ("scan:1", "ghost:4"), USERS: ("scan:4", "direct:1")}
"""Where all weights are trained."""
IN_JAX = {"JAX, plain": (4, 8), "jax_privacy": (1,)}
IN_TORCH = {"plain": (4, 8), "hooks": (4, 8), "ghost": (4,), "opake": (4, 8)}
WHOLE_IN_TORCH = {"plain": (4, 8), "hooks": (2, 4), "ghost": (4, 8)}
"""Fewer texts in a pass, each of which has a gradient of the model's size. opake took 14 GiB."""
PEERS = {"plain": "PyTorch, plain", "hooks": "Opacus, hooks", "ghost": "Opacus, ghost clipping"}
FULL = ", MKL at full speed"
QUICK = {**SMOLLM2, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 96}
CONFIGS = {
    True: TransformerConfig(260, 128, 32, 2, **QUICK),
    False: TransformerConfig(49_152, 128, 576, 30, **SMOLLM2),
}
Call = Callable[[], Any]


class Way(NamedTuple):
    """A way to compute of a contestant."""

    contestant: str
    name: str
    """The strategy, or the number of texts of a pass."""
    call: Call
    seconds: float
    """Processor seconds of a trial."""
    memory_mib: float
    """Beside parameters and result."""


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


class Problem:
    """The task, its parameters, and what the contestants compute."""

    def __init__(self, config: TransformerConfig, whole: bool):
        key, first = jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
        weights = jax.tree.map(np.asarray, jax.jit(Transformer(config).init)(key, first)["params"])
        self.size = num_coordinates(weights)
        if whole:
            self.frozen, self.params = None, weights
            self.task = Texts(None, config)  # pyright: ignore
        else:
            adapted = lora.adapted(config, RANK, ALPHA)
            self.frozen = stacked(weights, config.num_layers)
            self.task = Texts(None, adapted, frozen=self.frozen)  # pyright: ignore
            params = jax.tree.map(np.asarray, lora.init(adapted, key))
            self.params = stacked(params, config.num_layers)
        self.engine = LocalEngine(self.task, num_lanes=LANES)

    def clipped_sum(self, group: int, strategy: Strategy) -> tuple[Call, float]:
        """The clipped sum of users of so many texts, and its memory in MiB."""
        rows, compiled = np.arange(len(LENGTHS)), self.engine._worker.programs.compiled
        arguments = self.params, rows.reshape(-1, group), CLIP, strategy
        call, before = functools.partial(self.engine.clipped_sum, *arguments), set(compiled)
        call()
        programs = [each for key, each in compiled.items() if key not in before]
        return call, max(map(temporary_mib, programs))

    def evaluation(self) -> float:
        """The loss of all texts."""
        return self.engine.mean_nats(self.params, "train", np.arange(len(LENGTHS)))

    def in_passes(self, function: Callable[..., Any], rows: int) -> tuple[Call, float]:
        """The sum of a function over passes of so many texts, and its memory in MiB."""
        params, *frozen = self._on_device
        passes, memory = [], 0.0
        _added(params, params)  # its program
        for part in self.parts(rows):
            program = jax.jit(function).lower(params, part, *frozen).compile()
            passes.append(functools.partial(program, params, part, *frozen))
            memory = max(memory, temporary_mib(program))

        def call() -> Any:  # a pass at a time, or the gradients of all are in memory
            return functools.reduce(_added, (jax.block_until_ready(each()) for each in passes))

        return call, memory

    def parts(self, rows: int) -> Iterator[dict[str, np.ndarray]]:
        """Yield so many texts at a time, in order of length and as long as the longest of them."""
        every = np.arange(len(LENGTHS))
        batch = self.task.read("train", every[np.argsort(self.task.sizes("train", every))])
        for first in range(0, len(every), rows):
            tokens, sizes = (batch[name][first : first + rows] for name in ("tokens", "sizes"))
            yield {"tokens": tokens[:, : sizes.max()], "sizes": sizes}

    def loss(self, params: Any, part: Any, *frozen: Any) -> jax.Array:
        """The sum of the losses of some texts."""
        return self.task.losses(params, part, *frozen).sum()

    @functools.cached_property
    def _on_device(self) -> list[Any]:
        """The parameters, and the weights that are not trained, if some are."""
        frozen = [] if self.frozen is None else [self.frozen]
        return jax.device_put([self.params, *frozen])


@jax.jit
def _added(total: Any, gradient: Any) -> Any:
    return jax.tree.map(jnp.add, total, gradient)


def tried(contestant: str, name: str, call: Call, memory_mib: float) -> Way:
    """A way after its trial in this process."""
    (seconds,) = in_turn({name: call}, 1, warm=True)[name]
    ctypes.CDLL(None).malloc_trim(0)  # workers keep freed memory, which others need here
    print(contestant, name, seconds, memory_mib, file=sys.stderr, flush=True)
    return Way(contestant, name, call, seconds, memory_mib)


def in_fedsim(problem: Problem, quick: bool, whole: bool) -> Iterator[Way]:
    """Yield the ways of fedsim; one for each number of texts of a user, if `quick`."""
    for contestant, group in GROUPS.items():
        for name in (WHOLE if whole else STRATEGIES)[contestant][-1 if quick else 0 :]:
            yield tried(contestant, name, *problem.clipped_sum(group, Strategy.parse(name)))


def in_jax(problem: Problem) -> Iterator[Way]:
    """Yield the ways of JAX and jax_privacy. One text at a time is padded as four are: each length
    is a program."""
    from jax_privacy import clipped_grad

    for rows in IN_JAX["JAX, plain"]:
        yield tried("JAX, plain", str(rows), *problem.in_passes(jax.grad(problem.loss), rows))
    for rows in IN_JAX["jax_privacy"]:
        how = {"l2_clip_norm": CLIP.norm, "rescale_to_unit_norm": True, "microbatch_size": rows}
        clipped = clipped_grad(problem.loss, **how)
        yield tried("jax_privacy", str(rows), *problem.in_passes(clipped, max(4, rows)))


def in_torch(peer: run.Adapters, ending: str) -> Iterator[Way]:
    """Yield the ways of peers on PyTorch."""
    for key, trial in peer.trials.items():
        name, _, rows = key.partition(":")
        call = functools.partial(peer.seconds, key)
        yield Way(PEERS.get(name, name) + ending, rows, call, *trial)


def fastest(ways: list[Way]) -> dict[str, Way]:
    """The best way of each contestant."""
    return {way.contestant: way for way in sorted(ways, key=lambda way: -way.seconds)}


def measured(
    config: TransformerConfig, turns: int, *, whole: bool, quick: bool, peers: bool
) -> dict[str, Any]:
    """Seconds, and shares of the rate of products."""
    problem = Problem(config, whole)
    square = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    product = jax.jit(lambda a: jax.lax.fori_loop(0, TIMES, lambda _, b: a @ b / SIZE, a))
    calls = {"products": lambda: product(square), "evaluation": problem.evaluation}
    for call in calls.values():
        jax.block_until_ready(call())  # a first call compiles
    ways = list(in_fedsim(problem, quick, whole)) + ([] if quick else list(in_jax(problem)))
    seconds: dict[str, float] = {}

    def time() -> None:
        """The best ways and calls that have no time yet, in turn."""
        every = {**{name: way.call for name, way in fastest(ways).items()}, **calls}
        left = {name: call for name, call in every.items() if name not in seconds}
        found = in_turn(left, turns, warm=True)
        seconds.update({name: median(own) for name, own in found.items()})

    with ExitStack() as stack:
        endings = ("", FULL) if peers and run.mkl_says_intel() else ("",) if peers else ()
        for ending in endings[-1:] if whole else endings:
            for name, passes in (WHOLE_IN_TORCH if whole else IN_TORCH).items():
                time()  # memory has no room for the models of all peers
                stack.close()
                given = config, 0 if whole else RANK, LENGTHS, {name: passes}
                peer = stack.enter_context(closing(run.Adapters(*given, mkl=ending == FULL)))
                calls[f"products{ending or ', MKL'}"] = functools.partial(peer.seconds, "products")
                ways += in_torch(peer, ending)
        time()
    best = fastest(ways)
    gflops = {
        name: TIMES * 2 * SIZE**3 / own / 1e9
        for name, own in seconds.items()
        if name.startswith("products")
    }
    size, trained = problem.size, num_coordinates(problem.params)
    each = 3 if whole else 2  # products of a gradient
    products = 2e-9 * size * sum(LENGTHS) / gflops["products"]  # seconds of one for each parameter
    rows = []
    for name in dict.fromkeys(way.contestant for way in ways):
        row = {"name": name, "best": best[name].name, "seconds": seconds[name]}
        row |= {"memory_mib": best[name].memory_mib, "share": each * products / seconds[name]}
        row |= {"of_examples": seconds[name] / seconds[EXAMPLES]}
        row["trials"] = {way.name: way.seconds for way in ways if way.contestant == name}
        rows.append(row)
    found = {"parameters": size, "trained": trained, "tokens": sum(LENGTHS), "gflops": gflops}
    evaluation = {"seconds": seconds["evaluation"], "share": products / seconds["evaluation"]}
    return {**found, "evaluation": evaluation, "rows": rows}


def bars(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The aims: shares of the machine's rate, and no peer ahead."""
    rows = {row["name"]: row for row in found["rows"]}
    aims = [
        at_least("clipped sum of 32 texts", rows[EXAMPLES]["share"], SHARE),
        at_least("loss of 32 texts", found["evaluation"]["share"], SHARE),
    ]
    seconds = {name: row["seconds"] for name, row in rows.items()}
    private = ("jax_privacy", "Opacus, hooks", "Opacus, ghost clipping", "opake")
    if started := [seconds[name] for name in private if name in seconds]:
        ratio = seconds[EXAMPLES] / min(started)
        aims.append(at_most(f"{EXAMPLES} / fastest private peer as it starts", ratio, 1.0))
    if hooks := seconds.get(f"Opacus, hooks{FULL}"):
        for ours, bound in ((EXAMPLES, 1.1), (USERS, 1.0)):
            name = f"{ours} / Opacus, hooks{FULL}"
            aims.append(at_most(name, seconds[ours] / hooks, bound))
    return aims


def main() -> None:
    parser = parser_of(__doc__, "a tiny model, fedsim alone")
    parser.add_argument("--whole", action="store_true", help="train all weights, without adapters")
    parser.add_argument("--no-peers", action="store_true", help="leave peers on PyTorch out")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    keep_memory()  # as workers do
    turns, peers = (1, False) if given.quick else (given.turns, not given.no_peers)
    how = {"whole": given.whole, "quick": given.quick, "peers": peers}
    found = measured(CONFIGS[given.quick], turns, **how)
    for line in (found["gflops"], found["evaluation"], *found["rows"]):
        print(line, file=sys.stderr)
    write(bars(found), ("fedsim", "jax", "flax", "numpy", "jax_privacy"), given.json, **found)


if __name__ == "__main__":
    main()
