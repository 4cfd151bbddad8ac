"""What private training costs on the accelerator that is there, and whether it can be repeated.

    python -m experiments.benchmarks.accelerator [--quick] [--json] [--out FILE] [--at-once N]
                                                 [--only PART ...]
                                              (half an hour; quick: two minutes)

It was run on one NVIDIA H100, whose rows are in results/benchmark_accelerator.json, and in its
quick form on a CPU. It needs no Ray. Parts, in this order:

- `private`: runs on `pydocs`, by both algorithms, in float32 and bfloat16. Each is replayed bit
  by bit; a second one is killed halfway and resumed.
- `memory`: peak bytes of one program, by the device's own count, each in a process of its own.
- `speed`: plain gradients and clipped sums of models with random weights. `ratio` is the seconds of
  the fastest plain gradient of as many rows over those of a clipped sum: 1 where clipping is free.
  `mfu` is the share of the device's peak in bfloat16: six times parameters times tokens (with
  adapters four times; products of attention are not counted) over seconds and peak. `at_once` is
  the units of a pass: runs on an accelerator take one (docs/lab/accelerator.md), more say what that
  costs. `kernels` are deterministic in runs; `any` says what that costs.
- `attention`: the gradient of one layer's attention by XLA and by cuDNN; whether twenty repeats
  have the same bits, and whether a row's bits depend on its place.

What time did not allow, and what the memory did not hold, is listed under `skipped`.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.common import at_least, circumstances
from fedsim.clipping import Clip, Strategy, clip_chunk, num_coordinates, zeros_like
from fedsim.clipping.strategy import in_one_product
from fedsim.engine.programs import check_arithmetic, compiler_options
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.models import LanguageModelTask, Transformer, TransformerConfig, lora, stacked

CLIP = Clip(1.0, normalised=True)
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
PARTS = ("private", "memory", "attention", "speed", "noise")
LONGEST = 4096
STEPS = {False: 60, True: 4}  # of a private run; True: the quick form
LAST_S = 900.0  # of times; no cell is begun after that


@dataclasses.dataclass(frozen=True)
class Model:
    """A shape with random weights: the cost of a step does not depend on them."""

    name: str
    config: TransformerConfig
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class Cell:
    """A plain gradient, or a clipped sum over units of `group` rows."""

    length: int
    """Predicted tokens of a row."""
    step: int
    """Rows of the step."""
    rows: int
    """Rows of a pass."""
    group: int = 0
    """Rows of a unit. 0: a plain gradient."""
    attention: str = "xla"
    kernels: str = "deterministic"

    @property
    def name(self) -> str:
        """As in the record."""
        if not self.group:
            return f"plain:{self.rows}"
        return "ELS" if self.group == 1 else f"ULS G={self.group}"


def models(quick: bool) -> list[Model]:
    if quick:
        tiny = TransformerConfig(260, 17, 16, 2, 2, "bfloat16", num_positions=17)
        return [Model("tiny", tiny), Model("tiny, LoRA", tiny, 2)]
    paper = TransformerConfig(30_522, 129, 1024, 24, 16, "bfloat16", num_positions=LONGEST)
    small = TransformerConfig(49_152, 129, 576, 30, dtype="bfloat16", **SMOLLM2)
    return [Model("350M", paper), Model("SmolLM2-135M, LoRA", small, 8)]


def cells(model: Model, quick: bool) -> Iterator[Cell]:
    """The cells of a model, the more telling ones first."""
    if quick:
        yield from (Cell(16, 4, 4), Cell(16, 4, 4, 4), Cell(16, 4, 1, 1))
        return
    whole = not model.rank
    for length, step, passes in ((128, 64, (64, 16)), (1024, 32, (16, 4)), (2048, 16, (4, 1))):
        yield from (Cell(length, step, rows) for rows in passes)
        yield from (Cell(length, step, min(g, passes[0]), g) for g in (1, 4, 16))
    yield Cell(128, 64, 64, 64)
    for length, step, rows in ((1024, 32, 16), (2048, 16, 4), (4096, 8, 2)):
        fast = functools.partial(Cell, length, step, attention="cudnn")
        yield from (fast(rows), fast(1, 1), fast(rows, rows))
    yield Cell(128, 64, 16, 4) if whole else Cell(128, 64, 32, 1)  # not allowed in runs
    yield Cell(128, 64, 64, kernels="any")
    yield from (Cell(128, 64, g, g, kernels="any") for g in (1, 16))


Losses = Callable[[Any, Any, jax.Array], jax.Array]  # of rows, for frozen and other parameters


def plain_gradient(losses: Losses, rows: int) -> Callable[..., Any]:
    """The gradient of all rows, so many at a time, with products in fedsim's order."""

    def gradient(frozen, params, tokens):
        each = in_one_product(functools.partial(losses, frozen))

        def add(total, part):
            grad = jax.grad(lambda p: each(p, part).sum())(params)
            return jax.tree.map(jnp.add, total, grad), None

        parts = tokens.reshape(-1, rows, tokens.shape[1])
        return jax.lax.scan(add, zeros_like(params), parts)[0]

    return gradient


def clipped_sum(losses: Losses, group: int, strategy: Strategy) -> Callable[..., Any]:
    """The clipped sum over units of `group` rows."""

    def clipped(frozen, params, tokens):
        units = tokens.reshape(-1, group, tokens.shape[1])
        mask, each = jnp.ones(units.shape[:2], bool), functools.partial(losses, frozen)
        return clip_chunk(each, params, units, mask, CLIP, strategy)

    return clipped


def options_of(kernels: str) -> Any:
    """Of the compiler: those of runs, or none."""
    return None if kernels == "any" else compiler_options(jax.default_backend())


class Problem:
    """A model and its parameters on the device."""

    def __init__(self, model: Model):
        self.config, first = model.config, jax.ShapeDtypeStruct((1, 2), jnp.int32)
        rng = np.random.default_rng(0)

        def some(leaf):
            drawn = rng.standard_normal(leaf.shape, np.float32)
            return drawn * np.float32(0.02) if leaf.ndim > 1 else np.ones_like(drawn)

        shapes = jax.eval_shape(Transformer(self.config).init, jax.random.key(0), first)["params"]
        params = stacked(jax.tree.map(some, shapes), self.config.num_layers)
        self.size, self.frozen = num_coordinates(params), None
        self.factor = 4 if model.rank else 6
        if model.rank:
            self.frozen = jax.device_put(params)
            self.config = lora.adapted(self.config, model.rank, 16.0)
            shapes = jax.eval_shape(functools.partial(lora.init, self.config), jax.random.key(0))
            params = stacked(jax.tree.map(some, shapes), self.config.num_layers)
        self.params = jax.device_put(params)

    def arguments(self, cell: Cell) -> tuple[Any, Any, jax.Array]:
        """Frozen parameters, parameters, and random tokens."""
        shape, rng = (cell.step, cell.length + 1), np.random.default_rng(0)
        tokens = rng.integers(self.config.vocab_size, size=shape, dtype=np.int32)
        return self.frozen, self.params, jnp.asarray(tokens)

    def losses(self, length: int) -> Losses:
        """The losses of rows of `length` predicted tokens."""
        task = LanguageModelTask(None, dataclasses.replace(self.config, max_length=length + 1))

        def losses(frozen: Any, params: Any, tokens: jax.Array) -> jax.Array:
            params = params if frozen is None else lora.joined(frozen, params)
            sizes = jnp.full(len(tokens), tokens.shape[1])
            return task.losses(params, {"tokens": tokens, "sizes": sizes})

        return losses

    def function(self, cell: Cell) -> Callable[..., Any]:
        """The plain gradient or the clipped sum of a cell."""
        losses = self.losses(cell.length)
        if cell.group:
            return clipped_sum(losses, cell.group, Strategy("direct", cell.rows))
        return plain_gradient(losses, cell.rows)

    def lowered(self, cell: Cell) -> Any:
        """The program before it is compiled."""
        own = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        other = mock.patch.object(jax.nn, "dot_product_attention", own)
        with other if cell.attention == "cudnn" else contextlib.nullcontext():
            return jax.jit(self.function(cell)).lower(*self.arguments(cell))


def timed(program: Any, arguments: tuple[Any, ...], repeats: int) -> tuple[float, bool, Any]:
    """(seconds, the median; whether all results had the same bits; the result)."""
    first, seconds, alike = jax.block_until_ready(program(*arguments)), [], True
    for _ in range(repeats):
        start = time.perf_counter()
        again = jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - start)
        alike = alike and same(first, again)
        del again
    return statistics.median(seconds), alike, first


@jax.jit
def _equal(one: Any, other: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jnp.stack([jnp.array_equal(a, b, equal_nan=True) for a, b in pairs]).all()


def same(one: Any, other: Any) -> bool:
    """True if two trees have the same numbers."""
    return bool(_equal(one, other))


def temporary_gib(program: Any) -> float:
    """What a program takes beside arguments and result."""
    analysis = program.memory_analysis()
    return analysis.temp_size_in_bytes / 2**30 if analysis else 0.0


def without_memory(error: Exception) -> bool:
    """True if a program failed because the device's memory is too small."""
    return "RESOURCE_EXHAUSTED" in str(error)


# ---- Parts that run in processes of their own ---------------------------------------------------


def started(**wanted: Any) -> subprocess.Popen:
    """Start this file for one child's part; it prints its result as the last line."""
    command = [sys.executable, "-m", "experiments.benchmarks.accelerator", "--child"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, json.dumps(wanted)], **pipes)


def ended(child: subprocess.Popen) -> dict[str, Any]:
    """The result of a child, or the end of what it wrote about its fault."""
    out, err = child.communicate()
    return json.loads(out.splitlines()[-1]) if child.returncode == 0 else {"fault": err[-2000:]}


def private(place: str, algorithm: str, dtype: str, quick: bool, resume: bool) -> dict[str, Any]:
    """Train on `pydocs`, here, and compute the run again, unless it is one to be resumed."""
    from fedsim.config import Algorithm, PrivacyConfig, run_config
    from fedsim.run import Console
    from fedsim.training import train
    from fedsim.trust import verify

    run, console = Path(place), Console()
    steps, batch_size = (STEPS[quick], 4 if quick else 64)
    privacy = PrivacyConfig(epsilon=8.0, num_steps=steps, batch_size=batch_size, group_size=2)
    settings: dict[str, Any] = {"data": "pydocs", "engine": "local", "seed": 1, "resume": resume}
    settings |= {"model": "micro" if quick else "small", "compute_dtype": dtype}
    settings |= {"eval_examples": 8, "checkpoint_every": 5, "budget_ledger": run.parent / "budget"}
    settings |= {"rows_per_pass": 2} if quick else {}
    start = time.perf_counter()
    kind = Algorithm.ELS if algorithm == "els" else Algorithm.ULS
    summary = train(kind, privacy, run_config(run_dir=run, **settings), console)
    found = {"epsilon": summary["epsilon"], "strategy": summary.get("strategy")}
    found["train_s"] = time.perf_counter() - start
    start = time.perf_counter()
    checks = verify(run, again="whole", console=console)
    found |= {"verify": {check.promise: check.verdict for check in checks}}
    return found | {"verify_s": time.perf_counter() - start}


def settings(quick: bool) -> Iterator[tuple[str, str]]:
    """Algorithms and precisions of the private runs."""
    if quick:
        yield "uls", "bfloat16"
    else:
        yield from itertools.product(("uls", "els"), ("float32", "bfloat16"))


def private_runs(quick: bool, algorithm: str, dtype: str) -> dict[str, Any]:
    """A run that is replayed, and its double that is killed halfway and resumed."""
    with tempfile.TemporaryDirectory() as scratch:
        one = {"part": "private", "algorithm": algorithm, "dtype": dtype, "quick": quick}
        found = ended(started(**one, place=f"{scratch}/run", resume=False))
        again = {**one, "place": f"{scratch}/again", "resume": True}
        child, ledger = started(**again), Path(scratch) / "again" / "ledger.jsonl"
        half, done = STEPS[quick] // 2, 0
        while child.poll() is None and done < half:
            time.sleep(0.002)
            done = len(ledger.read_bytes().splitlines()) - 2 if ledger.exists() else 0
        killed = child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.communicate()
        resumed = ended(started(**again))
        found |= {"killed": killed, "lines_when_killed": done}
        found["resumed_replays"] = resumed.get("verify", {}).get("replay") == "OK"
        if "fault" in resumed:
            found["fault"] = resumed["fault"]
    return {"part": "private", "algorithm": algorithm, "dtype": dtype, **found}


def memory(model: str, cell: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Peak bytes of one program in a process that has run no other."""
    own = Cell(**cell)
    problem = Problem(next(each for each in models(quick) if each.name == model))
    arguments = problem.arguments(own)
    program = problem.lowered(own).compile(options_of(own.kernels))
    stats = jax.devices()[0].memory_stats() or {}
    before = stats.get("peak_bytes_in_use", 0)
    jax.block_until_ready(program(*arguments))
    stats = jax.devices()[0].memory_stats() or {}
    found = {"peak_gib": stats.get("peak_bytes_in_use", 0) / 2**30, "before_gib": before / 2**30}
    return found | {"temporary_gib": temporary_gib(program)}


def memory_cells(quick: bool) -> Iterator[tuple[str, Cell]]:
    """Plain gradients and clipped sums with equal passes, for other numbers of rows and units."""
    if quick:
        yield "tiny", Cell(16, 4, 2, 2)
        return
    for step, rows, group in ((64, 8, 0), (256, 8, 0), (16, 8, 8), (64, 8, 8), (256, 8, 8)):
        yield "350M", Cell(128, step, rows, group)
    yield from (("350M", Cell(128, 256, 8, group)) for group in (32, 128))
    yield from (("350M", Cell(128, step, 1, group)) for step, group in ((64, 0), (8, 1), (64, 1)))
    yield from (("SmolLM2-135M, LoRA", Cell(128, 64, 8, group)) for group in (0, 8))


def memory_row(quick: bool, model: str, cell: Cell) -> dict[str, Any]:
    wanted = {"model": model, "cell": dataclasses.asdict(cell), "quick": quick}
    return {"part": "memory", **named(model, cell), **ended(started(part="memory", **wanted))}


def named(model: str, cell: Cell) -> dict[str, Any]:
    """Columns that say what was measured."""
    found = {"model": model, "cell": cell.name, **dataclasses.asdict(cell)}
    if cell.group:
        strategy = Strategy("direct", cell.rows)
        found |= {"strategy": str(strategy), "at_once": strategy.units_at_once(cell.group)}
    return found


# ---- Times -------------------------------------------------------------------------------------


def speed(
    compiled: dict[tuple[str, Cell], Future],
    problems: dict[str, Problem],
    last: float,
    skipped: list[str],
) -> Iterator[dict[str, Any]]:
    """Time all programs, as long as `last` has not come."""
    peak = next((p for name, p in PEAKS.items() if name in jax.devices()[0].device_kind), None)
    plain: dict[tuple, float] = {}
    for model, cell in list(compiled):  # a program is let go before the next one runs
        future, problem, what = compiled.pop((model, cell)), problems[model], f"{model}, {cell}"
        if time.monotonic() > last:
            skipped.append(f"{what}: time")
            continue
        try:
            program = future.result()
            arguments = problem.arguments(cell)
            seconds, alike, _ = timed(program, arguments, 3)
        except Exception as error:  # noqa: BLE001 (of the compiler or the device: the rest goes on)
            skipped.append(f"{what}: {'memory' if without_memory(error) else str(error)[:300]}")
            continue
        row = {"part": "speed", **named(model, cell), "seconds": seconds, "same_bits": alike}
        row |= {"gradients_per_s": cell.step / seconds, "temporary_gib": temporary_gib(program)}
        products = problem.factor * problem.size * cell.step * cell.length
        row["mfu"] = products / seconds / peak if peak else None
        like = (model, cell.length, cell.attention, cell.kernels)
        if cell.group:
            row["ratio"] = plain[like] / seconds if like in plain else None
        else:
            plain[like] = min(seconds, plain.get(like, seconds))
        yield row


def noise(problem: Problem) -> dict[str, Any]:
    """Seconds to fetch a sum of the size of the parameters, and to draw and add its noise."""
    total = jax.block_until_ready(zeros_like(problem.params, jnp.int32))
    start = time.perf_counter()
    fetched = jax.tree.map(np.asarray, total)
    between = time.perf_counter()
    own = {"clip": CLIP, "noise_multiplier": 1.0, "count": 64.0}
    noisy_mean(fetched, **own, key=SecretKey.create(0), step=0)
    end = time.perf_counter()
    return {"part": "noise", "fetch_s": between - start, "noise_s": end - between}


def attention(quick: bool) -> Iterator[dict[str, Any]]:
    """The gradient of a layer's attention, 16 heads of width 64, causal."""
    for rows, length in ((2, 16),) if quick else ((4, 2048), (2, 4096)):
        shape = (rows, length, 16, 64)
        keys = jax.random.split(jax.random.key(0), 4)
        q, k, v, g = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)

        def gradient(implementation, q, k, v, g):
            own = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
            y, back = jax.vjp(functools.partial(own, is_causal=True), q, k, v)
            return y, *back(g)

        wide = [x.astype(jnp.float32) for x in (q, k, v, g)]
        with jax.default_matmul_precision("highest"):
            exact = jax.jit(functools.partial(gradient, "xla"))(*wide)
        for implementation in ("xla", "cudnn"):
            for kernels in ("deterministic",) if quick else ("deterministic", "any"):
                row = {"part": "attention", "implementation": implementation, "kernels": kernels}
                row |= {"rows": rows, "length": length}
                try:
                    lowered = jax.jit(functools.partial(gradient, implementation)).lower(q, k, v, g)
                    program = lowered.compile(options_of(kernels))
                    seconds, alike, found = timed(program, (q, k, v, g), 20)
                    row |= {"seconds": seconds, "same_bits": alike}
                    row["temporary_gib"] = temporary_gib(program)
                    moved = program(*(jnp.roll(x, 1, axis=0) for x in (q, k, v, g)))
                    back = tuple(jnp.roll(x, -1, axis=0) for x in moved)
                    row["same_bits_elsewhere"] = same(found, back)
                    row["error"] = max(map(distance, found, exact))
                except Exception as error:  # noqa: BLE001 (a device may lack an implementation)
                    row["fault"] = str(error)[:300]
                yield row


def distance(found: jax.Array, exact: jax.Array) -> float:
    """Relative, in L2 norm."""
    return float(jnp.linalg.norm((found - exact).ravel()) / jnp.linalg.norm(exact.ravel()))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--out", type=Path, help="a file for the same object")
    parser.add_argument("--at-once", type=int, default=1, help="processes beside each other")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        part = {"private": private, "memory": memory}[given.child.pop("part")]
        print(json.dumps(part(**given.child)))
        return {}
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # children need some
    device, quick = jax.devices()[0], given.quick
    check_arithmetic(device)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []

    def note(row):
        rows.append({key: value for key, value in row.items() if value is not None})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    problems, compiled, only = {}, {}, given.only
    with ThreadPoolExecutor(given.at_once) as processes, ThreadPoolExecutor() as compilers:
        children = []
        if "private" in only:
            children += [processes.submit(private_runs, quick, *each) for each in settings(quick)]
        if "memory" in only:
            children += [processes.submit(memory_row, quick, *each) for each in memory_cells(quick)]
        for model in models(quick) if {"speed", "noise"}.intersection(only) else ():
            problems[model.name] = Problem(model)
            for cell in cells(model, quick) if "speed" in only else ():
                lowered, options = problems[model.name].lowered(cell), options_of(cell.kernels)
                compiled[model.name, cell] = compilers.submit(lowered.compile, options)
        for child in as_completed(children):
            note(child.result())
    # Nothing else runs from here on, so that times are those of an idle device.
    last = time.monotonic() + LAST_S
    for row in attention(quick) if "attention" in only else ():
        note(row)
    for row in speed(compiled, problems, last, skipped):
        note(row)
    for name, problem in problems.items() if "noise" in only else ():
        note({"model": name, **noise(problem)})
    found = circumstances("jax", "jaxlib", "flax", "numpy")
    found["machine"] |= {"device": device.device_kind, "platform": device.platform}
    found["machine"]["runtime"] = device.client.platform_version
    found |= {"rows": rows, "skipped": skipped, "bars": bars(rows)}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    if given.json:
        print(json.dumps(found))
    return found


def bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The aims for 350 M parameters and users of 4 or 16 rows, where an accelerator was timed."""
    found = []
    for length in (128, 1024):
        own = [row for row in rows if (row.get("model"), row.get("length")) == ("350M", length)]
        own = [row for row in own if row["part"] == "speed" and row.get("at_once") == 1]
        own = [row for row in own if row["group"] in (4, 16) and row["attention"] == "xla"]
        own = [row for row in own if row["kernels"] == "deterministic" and "mfu" in row]
        if own:
            what, ratio = f"ULS, rows of {length} tokens", max(row["ratio"] for row in own)
            found.append(at_least(f"{what}: speed over that of a plain step", ratio, 0.95))
            share = max(row["mfu"] for row in own)
            found.append(at_least(f"{what}: share of the bfloat16 peak", share, 0.4))
    return found


if __name__ == "__main__":
    main()
