"""What private training costs on the accelerator that is there, and whether it can be repeated.

    python -m experiments.benchmarks.accelerator [--minutes 8] [--quick] [--json] [--out FILE]
                                                 [--only PART ...] [--data SOURCE ...]

Earlier forms were run on one NVIDIA H100 (results/benchmark_accelerator.json), this one, in its
quick form, on a CPU alone. It needs no Ray. Parts, the more telling ones first:

- `private`: runs on `pydocs` by both algorithms, each killed halfway, resumed, and computed again
  whole; and the programs that they compiled.
- `speed`: plain gradients and clipped sums of models with random weights, by the strategy that a
  run would take, or by another where the row says so. `ratio` is the speed of a clipped sum over
  that of the fastest plain gradient: 1 where clipping is free. `mfu` is the share of the device's
  peak in bfloat16: six times parameters times tokens (with adapters four times; products of
  attention are not counted) over seconds and peak. `attention` is cudnn where the device has it.
- `places`: whether units beside a unit change what it adds, as a run looks at its programs.
- `noise`: seconds to fetch a sum, and to draw and add its noise; and of passes whose noise is drawn
  after them, and beside them.
- `padding`: positions that are computed for one position with a token. It needs no accelerator.

It ends within --minutes; what time or memory did not allow is listed under `skipped`.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.common import at_least, circumstances
from fedsim.clipping import (
    AUTO,
    Clip,
    Strategy,
    UnsupportedModel,
    by_rule,
    clip_chunk,
    lattice_bits,
    num_coordinates,
    zeros_like,
)
from fedsim.clipping.strategy import TOKENS_OF_PASS, in_one_product
from fedsim.data import load
from fedsim.els import ELS
from fedsim.engine.programs import check_arithmetic, compiler_options
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.models import LanguageModelTask, TransformerConfig, lora, stacked
from fedsim.noise import Correlated
from fedsim.sampling import Sampling
from fedsim.uls import ULS

CLIP = Clip(1.0, normalised=True)
PEAKS = {  # dense bfloat16 products a second, by what JAX calls the device
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "mlp_width": 1536, "norm": "rms", "mlp": "swiglu"}
SMOLLM2 |= {"positions": "rope", "rope_base": 1e5, "mlp_bias": False, "norm_epsilon": 1e-5}
PARTS = ("private", "speed", "places", "noise", "padding")
STEPS = {False: 10, True: 4}  # of a private run; True: the quick form
SHARE_OF_PRIVATE = 0.4  # of the minutes, at most
MAX_LENGTH, STEP = 128, 512  # of `padding`: tokens, and gradients of a step


@dataclasses.dataclass(frozen=True)
class Cell:
    """A plain gradient, or a clipped sum over units of `group` rows."""

    model: str
    length: int
    """Predicted tokens of a row."""
    step: int
    """Rows of the step."""
    group: int = 0
    """Rows of a unit. 0: a plain gradient."""
    rows: int | None = None
    """Rows of a pass; None: by the rule."""
    strategy: str = AUTO
    fused: bool = True
    """By cuDNN where it takes the attention; false: by XLA."""


def models(quick: bool) -> dict[str, tuple[TransformerConfig, int]]:
    """Shapes and ranks of adapters, by name. A step's cost does not depend on the weights."""
    if quick:
        tiny = TransformerConfig(260, 17, 16, 2, 2, "bfloat16", num_positions=17)
        return {"tiny": (tiny, 0), "tiny, LoRA": (tiny, 2)}
    paper = TransformerConfig(30_522, 129, 1024, 24, 16, "bfloat16", num_positions=2048)
    small = TransformerConfig(49_152, 129, 576, 30, dtype="bfloat16", **SMOLLM2)
    return {"350M": (paper, 0), "SmolLM2-135M, LoRA": (small, 8)}


def cells(names: list[str], quick: bool) -> Iterator[Cell]:
    """The cells of the models, the more telling ones first."""
    if quick:
        for name in names:
            yield from (Cell(name, 16, 4, group, 4) for group in (0, 4, 1))
        yield Cell(names[0], 16, 4, 1, 4, "ghost")
        return
    for length, step, passes in ((128, 64, (64, 16)), (1024, 32, (16, 4))):
        for name in names:
            yield from (Cell(name, length, step, rows=rows) for rows in passes)
            yield from (Cell(name, length, step, group) for group in (1, 4, 16))
    whole, _ = names
    for step in (64, 512):
        yield Cell(whole, 128, step, 1, 32, "ghost")
        yield from (Cell(whole, 128, step, 1, rows, "direct") for rows in (6, 12, 32))
    for group, rows in ((0, 16), (1, None), (4, None)):
        yield Cell(whole, 1024, 32, group, rows, fused=False)


class Problem:
    """A model and its parameters on the device. Args: whole: the layers of a model are one tree,
    which compiles a layer once; `ghost` cannot look into that."""

    def __init__(self, config: TransformerConfig, rank: int, whole: bool):
        rng, key = np.random.default_rng(0), jax.random.key(0)

        def put(shapes):
            params = jax.tree.map(lambda x: 0.02 * rng.standard_normal(x.shape, np.float32), shapes)
            return jax.device_put(stacked(params, config.num_layers) if whole else params)

        shapes = jax.eval_shape(LanguageModelTask(None, config).init, key)
        self.config, self.params, self.size = config, put(shapes), num_coordinates(shapes)
        self.frozen: tuple[Any, ...] = ()
        if rank:
            self.frozen, self.config = (self.params,), lora.adapted(config, rank, 16.0)
            self.params = put(jax.eval_shape(functools.partial(lora.init, self.config), key))

    def arguments(self, cell: Cell) -> tuple[Any, ...]:
        """Parameters, random tokens, and frozen parameters if there are any."""
        shape, rng = (cell.step, cell.length + 1), np.random.default_rng(0)
        tokens = rng.integers(self.config.vocab_size, size=shape, dtype=np.int32)
        return self.params, jnp.asarray(tokens), *self.frozen

    def task(self, length: int) -> LanguageModelTask:
        """With rows of `length` predicted tokens."""
        return LanguageModelTask(None, dataclasses.replace(self.config, max_length=length + 1))

    def strategy(self, cell: Cell) -> Strategy:
        """That of a cell, as a run with public places would take it."""
        own: dict[str, Any] = {"group": cell.group, "length": cell.length, "on_cpu": False}
        own |= {"num_parameters": num_coordinates(self.params), "adapters": bool(self.frozen)}
        return by_rule(cell.strategy, cell.rows, public_places=True, **own)

    def lowered(self, cell: Cell) -> Any:
        """The program of a cell before it is compiled."""
        task, width = self.task(cell.length), cell.length + 1

        def losses(params, tokens, *frozen):
            sizes = jnp.full(len(tokens), width)
            return task.losses(params, {"tokens": tokens, "sizes": sizes}, *frozen)

        def plain(params, tokens, *frozen):  # with products in fedsim's order
            def add(total, part):
                each = in_one_product(lambda params, part: losses(params, part, *frozen))
                grad = jax.grad(lambda params: each(params, part).sum())(params)
                return jax.tree.map(jnp.add, total, grad), None

            return jax.lax.scan(add, zeros_like(params), tokens.reshape(-1, cell.rows, width))[0]

        def clipped(params, tokens, *frozen):
            units = tokens.reshape(-1, cell.group, width)
            how = units, jnp.ones(units.shape[:2], bool), CLIP, self.strategy(cell)
            return clip_chunk(lambda *own: losses(*own, *frozen), params, *how)

        by_xla = mock.patch("fedsim.models.attention.is_fused", lambda *own: False)
        with contextlib.nullcontext() if cell.fused else by_xla:
            return jax.jit(clipped if cell.group else plain).lower(*self.arguments(cell))

    def named(self, cell: Cell) -> dict[str, Any]:
        """Columns that say what was measured."""
        fused = cell.fused and "cuDNN" in self.task(cell.length).kernels
        row = {**dataclasses.asdict(cell), "attention": "cudnn" if fused else "xla"}
        if not cell.group:
            return row | {"cell": f"plain:{cell.rows}", "strategy": None}
        strategy = self.strategy(cell)
        row |= {"strategy": str(strategy), "at_once": strategy.units_at_once(cell.group)}
        return row | {"cell": "ELS" if cell.group == 1 else f"ULS G={cell.group}"}


def compiled(lowered: Any) -> Any:
    """Compile a program as a run does."""
    return lowered.compile(compiler_options(jax.default_backend()))


def timed(program: Any, arguments: tuple[Any, ...]) -> tuple[float, bool]:
    """(seconds, the median of three; whether all results had the same bits)."""
    first, seconds, alike = jax.block_until_ready(program(*arguments)), [], True
    for _ in range(3):
        start = time.perf_counter()
        again = jax.block_until_ready(program(*arguments))
        seconds.append(time.perf_counter() - start)
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
        alike &= all(bool(jnp.array_equal(*pair, equal_nan=True)) for pair in pairs)
        del again
    return statistics.median(seconds), alike


def train_and_verify(place: str, algorithm: str, quick: bool) -> dict[str, Any]:
    """Train on `pydocs`, or resume, and compute the run again. In a process of its own."""
    from fedsim.config import Algorithm, PrivacyConfig, run_config
    from fedsim.run import Console
    from fedsim.training import train
    from fedsim.trust import verify

    seconds: list[float] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        seconds.extend([duration_secs] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(note)
    run, console = Path(place), Console()
    size = 4 if quick else 64
    privacy = PrivacyConfig(8.0, num_steps=STEPS[quick], batch_size=size, group_size=2)
    settings: dict[str, Any] = {"data": "pydocs", "engine": "local", "seed": 1, "resume": True}
    settings |= {"model": "micro" if quick else "small", "compute_dtype": "bfloat16"}
    settings |= {"eval_examples": 8, "checkpoint_every": 2, "budget_ledger": run.parent / "budget"}
    settings |= {"rows_per_pass": 2} if quick else {}
    start = time.perf_counter()
    summary = train(Algorithm(algorithm), privacy, run_config(run_dir=run, **settings), console)
    found = {"epsilon": summary["epsilon"], "strategy": summary.get("strategy")}
    found |= {"train_s": time.perf_counter() - start, "programs": len(seconds)}
    found["compile_s"], start = sum(seconds), time.perf_counter()
    checks = verify(run, again="whole", console=console)
    found |= {"verify": {check.promise: check.verdict for check in checks}}
    return found | {"verify_s": time.perf_counter() - start}


def private(algorithm: str, quick: bool, last: float) -> dict[str, Any]:
    """A run that is killed halfway, resumed, and computed again whole."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        wanted = json.dumps({"place": str(run), "algorithm": algorithm, "quick": quick})
        command = [sys.executable, "-m", "experiments.benchmarks.accelerator", "--child", wanted]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        start, done = time.perf_counter(), 0
        with subprocess.Popen(command, **pipes) as child:
            while child.poll() is None and done < STEPS[quick] // 2 and time.monotonic() < last:
                time.sleep(0.002)
                ledger = run / "ledger.jsonl"
                done = len(ledger.read_bytes().splitlines()) - 2 if ledger.exists() else 0
            found: dict[str, Any] = {"killed": child.poll() is None, "lines_when_killed": done}
            child.send_signal(signal.SIGKILL)
            child.communicate()
        found["until_killed_s"] = time.perf_counter() - start
        with subprocess.Popen(command, **pipes) as child:
            try:
                out, err = child.communicate(timeout=max(1.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                out, err = child.communicate()[0], "time"
    found |= {"fault": err[-2000:]} if child.returncode else json.loads(out.splitlines()[-1])
    return {"part": "private", "algorithm": algorithm, **found}


def speed(
    programs: dict[Cell, Future], problem_of: Callable[[Cell], Problem], last: float, skipped: list
) -> Iterator[dict[str, Any]]:
    """Time all programs, as long as `last` has not come."""
    peak = next((p for name, p in PEAKS.items() if name in jax.devices()[0].device_kind), None)
    plain: dict[tuple, float] = {}
    for cell in list(programs):  # a program is let go before the next one runs
        problem, future = problem_of(cell), programs.pop(cell)
        try:
            program = future.result(timeout=max(0.0, last - time.monotonic()))
            seconds, alike = timed(program, problem.arguments(cell))
        except Exception as error:  # noqa: BLE001 (of the compiler or the device: the rest goes on)
            skipped.append(f"{cell}: {str(error)[:300] or 'time'}")
            continue
        row = {"part": "speed", **problem.named(cell), "seconds": seconds, "same_bits": alike}
        row["temporary_gib"] = program.memory_analysis().temp_size_in_bytes / 2**30
        row["gradients_per_s"] = cell.step / seconds
        products = (4 if problem.frozen else 6) * problem.size * cell.step * cell.length
        row["mfu"] = products / seconds / peak if peak else None
        like = (cell.model, cell.length, row["attention"])
        if cell.group:
            row["ratio"] = row["gradients_per_s"] / plain[like] if like in plain else None
        else:
            plain[like] = max(row["gradients_per_s"], plain.get(like, 0.0))
        yield row


def noise(problem: Problem, cell: Cell) -> dict[str, Any]:
    """Seconds to fetch a sum of the size of the parameters, and to draw and add its noise; and of
    8 calls of a cell's program with it, drawn after them or beside them."""
    total = jax.block_until_ready(zeros_like(problem.params, jnp.int32))
    start = time.perf_counter()
    fetched = jax.device_get(total)
    between = time.perf_counter()
    how: dict[str, Any] = {"noise_multiplier": 1.0, "count": 64.0, "key": SecretKey.create(0)}
    noisy_mean(fetched, clip=CLIP, step=0, **how)
    seconds = {"fetch_s": between - start, "noise_s": time.perf_counter() - between}
    program, arguments = compiled(problem.lowered(cell)), problem.arguments(cell)
    jax.block_until_ready(program(*arguments))
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(fetched))
    of = (1, how["key"], 2.0 ** lattice_bits(sum(sizes)), sizes)
    with ThreadPoolExecutor(1) as threads:
        for way in ("after", "beside"):
            kind, start = Correlated(1, 1), time.perf_counter()
            if way == "beside":
                kind.begin(threads, *of)
            for _ in range(8):
                jax.block_until_ready(program(*arguments))
            noisy_mean(fetched, clip=CLIP, step=1, add_noise=kind, **how)
            seconds[f"passes_and_noise_{way}_s"] = time.perf_counter() - start
    return {"part": "noise", **seconds}


def places(quick: bool) -> Iterator[dict[str, Any]]:
    """Whether a run on `pydocs` would use the programs of units side by side."""
    data, length = load("pydocs", max_length=MAX_LENGTH), MAX_LENGTH
    for name in ("direct",) if quick else ("direct", "ghost"):
        for dtype in ("bfloat16",) if quick else ("bfloat16", "float32"):
            config = TransformerConfig(2**16, length, 16 if quick else 256, 2, 4, dtype)
            engine = LocalEngine(task := LanguageModelTask(data, config), num_lanes=1)
            row = {"part": "places", "strategy": f"{name}:16", "dtype": dtype, "length": length}
            params, rows = task.init(jax.random.key(0)), np.arange(32)[:, None]
            try:
                engine.clipped_sum(params, rows, CLIP, Strategy(name, 16))
                yield row | {"others_change_nothing": True}
            except UnsupportedModel:
                yield row | {"others_change_nothing": False}


def padding(source: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Positions that a step computes for each with a token: with one length and places of the draw
    (`one_length`); with several lengths and places of the draw, as `several_lengths` counts them;
    and with passes of the texts that there are, sorted by length (`sorted`)."""
    data = load(source, max_length=MAX_LENGTH)
    task = LanguageModelTask(data, TransformerConfig(2**16, MAX_LENGTH, 1024, 24, 16))
    how = {"sampling": Sampling(), "key": SecretKey.create(0)}
    for algorithm, group in ((ELS, 4), (ULS, 4), (ULS, 16)):
        most = len(data.train.offsets[1:]) * group
        method = algorithm(data.train, batch_size=min(STEP, most), group_size=group, **how)
        counts = np.zeros(4, int)
        for rows in map(method.draw, range(1 if quick else 20)):
            sizes = task.sizes("train", rows.ravel()).reshape(rows.shape).max(axis=1)
            each = np.where(sizes > 0, task.buckets.holding(sizes), 0), rows.shape[1]
            one = positions(np.full(len(rows), MAX_LENGTH), rows.shape[1], drawn=True)
            real = task.sizes("train", rows.ravel()).sum()
            counts += [real, one, positions(*each, drawn=True), positions(*each, drawn=False)]
        row = {"part": "padding", "data": Path(source).stem, "group_size": group}
        row["algorithm"], names = algorithm.__name__, ("one_length", "several_lengths", "sorted")
        yield row | {name: n / counts[0] for name, n in zip(names, counts[1:], strict=True)}


def positions(lengths: np.ndarray, group: int, drawn: bool) -> int:
    """Positions of all passes, each of units of one length. Args: lengths: of the rows of each
    unit, 0: it has none; drawn: a unit's place is its number in the draw, modulo the units."""
    total = 0
    for length in np.unique(lengths[lengths > 0]).tolist():
        units = max(1, TOKENS_OF_PASS // (length * group))
        own = np.flatnonzero(lengths == length)
        passes = np.bincount(own % units).max() if drawn else -(-len(own) // units)
        total += int(passes) * units * group * length
    return total


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.0, help="it ends within these")
    parser.add_argument("--quick", action="store_true", help="tiny models: does it run?")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--out", type=Path, help="a file for the same object")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
    parser.add_argument("--data", nargs="+", default=["pydocs"], help="data of `padding`")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(train_and_verify(**given.child)))
        return {}
    start, limit = time.monotonic(), 60 * given.minutes - 20  # to end, and to write
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # children need some
    device, quick, only = jax.devices()[0], given.quick, given.only
    check_arithmetic(device)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []

    def note(row: dict[str, Any]) -> None:
        rows.append({key: value for key, value in row.items() if value is not None})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    named = models(quick)

    @functools.cache
    def problem(model: str, whole: bool = True) -> Problem:
        return Problem(*named[model], whole)

    def problem_of(cell: Cell) -> Problem:
        return problem(cell.model, cell.strategy != "ghost")

    compilers, programs = ThreadPoolExecutor(), {}
    with ThreadPoolExecutor() as processes:
        last = start + SHARE_OF_PRIVATE * limit
        kinds = () if "private" not in only else ("uls",) if quick else ("uls", "els")
        runs = [processes.submit(private, kind, quick, last) for kind in kinds]
        for cell in cells(list(named), quick) if "speed" in only else ():
            if time.monotonic() < last:
                programs[cell] = compilers.submit(compiled, problem_of(cell).lowered(cell))
            else:
                skipped.append(f"{cell}: time")
        for each in runs:
            note(each.result())
    # From here on no other process runs on the device.
    for row in speed(programs, problem_of, start + limit, skipped):
        note(row)
    compilers.shutdown(wait=False, cancel_futures=True)
    for part in (part for part in PARTS[2:] if part in only):
        if time.monotonic() > start + limit:
            skipped.append(f"{part}: time")
        elif part == "places":
            list(map(note, places(quick)))
        elif part == "noise":
            cell = functools.partial(Cell, length=16 if quick else 128, step=4 if quick else 64)
            for name in named:
                note({"model": name, **noise(problem(name), cell(name, rows=4 if quick else 16))})
        else:
            list(map(note, (row for source in given.data for row in padding(source, quick))))
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
    """The aims, where an accelerator was timed: clipped sums by the rule, and plain gradients."""
    found = []
    for row in (row for row in rows if "mfu" in row and row["fused"]):
        what = f"{row['model']}, {row['length']} tokens, {row['cell']}"
        is_long = row["length"] > 128
        if "ratio" in row and "rows" not in row:
            found.append(at_least(f"{what}: ratio", row["ratio"], 0.95 if is_long else 0.9))
        elif is_long and not row["group"]:
            found.append(at_least(f"{what}: share of the peak", row["mfu"], 0.4))
    return found


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # compilers of skipped programs may be at work
