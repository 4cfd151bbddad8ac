"""What private training costs on the accelerator that is there, and whether it can be repeated.

    python -m experiments.benchmarks.accelerator [--minutes 8] [--quick] [--json] [--out FILE]
                                                 [--only PART ...] [--data SOURCE ...]

It needs no Ray, and was run in its quick form on a CPU. Parts, the more telling ones first:

- `private`: runs on `pydocs` by both algorithms, each killed halfway, resumed, and computed again
  whole; seconds of their steps, and the programs that they compiled.
- `speed`: plain gradients and clipped sums of models with random weights, by the strategy that a
  run would take. `ratio` is the speed of a clipped sum over that of the fastest plain gradient: 1
  where clipping is free. `mfu` is the share of the device's peak in bfloat16: six times parameters
  times tokens (with adapters four times; products of attention are not counted) over seconds and
  peak. `attention` is cudnn where the device has it.
- `step`: steps of 512 rows, from parameters on the host to a noisy mean, with noise drawn beside
  the passes (`seconds`), and after them (`after_s`), which is the sum of the parts.
- `places`: whether units beside a unit change what it adds, as a run looks at its programs.
- `padding`: positions that are computed for one position with a token. It needs no accelerator.
- `others`: rows of `speed` with what fedsim would not take; `changed` is a key of CHANGES.

It ends within --minutes, writes after each row, and lists under `skipped` what was left out.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import itertools
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
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
from fedsim.files import write_json
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.models import LanguageModelTask, TransformerConfig, lora, stacked
from fedsim.noise import Correlated
from fedsim.sampling import Sampling
from fedsim.uls import ULS

CLIP = Clip(1.0, normalised=True)
PEAKS = {"NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # in bfloat16
SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "mlp_width": 1536, "norm": "rms", "mlp": "swiglu"}
SMOLLM2 |= {"positions": "rope", "rope_base": 1e5, "mlp_bias": False, "norm_epsilon": 1e-5}
PARTS = ("private", "speed", "step", "places", "padding", "others")
SHARES = {"private": 0.4, "speed": 0.7}  # of the minutes, at most, if other parts are wanted
LEAST = {"step": 90, "places": 60, "padding": 30}  # seconds left, or it is not begun
COMPILERS = max(1, min(4, (os.cpu_count() or 1) // 4))  # few: private runs compile, too
CHANGES: dict[str, tuple[str, Any]] = {  # what a cell has otherwise than fedsim
    "xla": ("fedsim.models.attention.is_fused", lambda *own: False),
    "logits": ("fedsim.models.language_model.CHUNK_LOGITS", 2**27),  # 16 times as many
    "tile": ("fedsim.clipping.ghost.ACCELERATOR_TILE", 2**24),
}
STEPS = {False: 10, True: 4}  # of a private run; True: the quick form
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
    changed: str = ""
    """A key of CHANGES, or nothing."""


def models(quick: bool) -> dict[str, tuple[TransformerConfig, int]]:
    """Shapes and ranks of adapters, by name. A step's cost does not depend on the weights."""
    if quick:
        tiny = TransformerConfig(260, 17, 16, 2, 2, "bfloat16", num_positions=17)
        return {"tiny": (tiny, 0), "tiny, LoRA": (tiny, 2)}
    paper = TransformerConfig(30_522, 129, 1024, 24, 16, "bfloat16", num_positions=2048)
    small = TransformerConfig(49_152, 129, 576, 30, dtype="bfloat16", **SMOLLM2)
    return {"350M": (paper, 0), "SmolLM2-135M, LoRA": (small, 8)}


def cells(names: list[str], quick: bool) -> Iterator[Cell]:
    """The cells of `speed` and of `others`, the more telling ones of each first."""
    whole, _ = names
    if quick:
        for name in names:
            yield from (Cell(name, 16, 4, group, 4) for group in (0, 4, 1))
        yield Cell(whole, 16, 4, 0, 4, changed="logits")
        yield from (Cell(whole, 16, 4, 1, 4, "ghost", changed) for changed in ("", "tile"))
        return
    for length, step, passes in ((128, 64, (64, 16)), (1024, 32, (16, 4))):
        for name in names:
            yield from (Cell(name, length, step, rows=rows) for rows in passes)
            yield from (Cell(name, length, step, group) for group in (1, 4, 16))
    yield Cell(whole, 128, STEP, rows=64)
    yield Cell(whole, 1024, 32, rows=16, changed="logits")
    for group, rows in ((0, 16), (1, None), (4, None)):
        yield Cell(whole, 1024, 32, group, rows, changed="xla")
    for step in (64, STEP):
        yield from (Cell(whole, 128, step, 1, rows, "direct") for rows in (6, 12, 32))
    steps = itertools.product((64, STEP), ("", "tile"))
    yield from (Cell(whole, 128, step, 1, 32, "ghost", changed) for step, changed in steps)


class RandomRows(LanguageModelTask):
    """A task whose rows have random tokens and the longest length."""

    def read(self, split: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        shape, rng = (len(rows), self.config.max_length), np.random.default_rng(0)
        tokens = rng.integers(self.config.vocab_size, size=shape, dtype=np.int32)
        return {"tokens": tokens, "sizes": np.full(len(rows), shape[1], np.int32)}

    def dummy_batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return self.read("", rows)


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
        """Parameters, random rows, and frozen parameters if there are any."""
        rows = self.task(cell.length).read("", np.arange(cell.step))
        return self.params, jax.device_put(rows), *self.frozen

    def task(self, length: int) -> LanguageModelTask:
        """With rows of `length` predicted tokens."""
        config = dataclasses.replace(self.config, max_length=length + 1)
        return RandomRows(None, config, *self.frozen)

    def strategy(self, cell: Cell) -> Strategy:
        """That of a cell, as a run with public places would take it."""
        own: dict[str, Any] = {"group": cell.group, "length": cell.length, "on_cpu": False}
        own |= {"num_parameters": num_coordinates(self.params), "adapters": bool(self.frozen)}
        return by_rule(cell.strategy, cell.rows, public_places=True, **own)

    def lowered(self, cell: Cell) -> Any:
        """The program of a cell before it is compiled."""
        task = self.task(cell.length)

        def split(batch, rows):
            return jax.tree.map(lambda leaf: leaf.reshape(-1, rows, *leaf.shape[1:]), batch)

        def plain(params, batch, *frozen):  # with products in fedsim's order
            def add(total, part):
                each = in_one_product(lambda params, part: task.losses(params, part, *frozen))
                grad = jax.grad(lambda params: each(params, part).sum())(params)
                return jax.tree.map(jnp.add, total, grad), None

            return jax.lax.scan(add, zeros_like(params), split(batch, cell.rows))[0]

        def clipped(params, batch, *frozen):
            units = split(batch, cell.group)
            how = units, jnp.ones(units["sizes"].shape, bool), CLIP, self.strategy(cell)
            return clip_chunk(lambda *own: task.losses(*own, *frozen), params, *how)

        changed = cell.changed and mock.patch(*CHANGES[cell.changed])
        with changed or contextlib.nullcontext():
            return jax.jit(clipped if cell.group else plain).lower(*self.arguments(cell))

    def named(self, cell: Cell) -> dict[str, Any]:
        """Columns that say what was measured."""
        fused = cell.changed != "xla" and "cuDNN" in self.task(cell.length).kernels
        row = {**dataclasses.asdict(cell), "attention": "cudnn" if fused else "xla"}
        if not cell.group:
            return row | {"cell": f"plain:{cell.rows}", "strategy": None}
        strategy = self.strategy(cell)
        row |= {"strategy": str(strategy), "at_once": strategy.units_at_once(cell.group)}
        return row | {"cell": "ELS" if cell.group == 1 else f"ULS G={cell.group}"}


def train_and_verify(place: str, algorithm: str, quick: bool) -> dict[str, Any]:
    """Train on `pydocs`, or resume, and compute the run again. In a process of its own."""
    from fedsim.config import Algorithm, PrivacyConfig, run_config
    from fedsim.run import Console
    from fedsim.training import train
    from fedsim.trust import verify

    seconds: list[float] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):  # said at once: it may not come to its end
            seconds.append(duration_secs)
            print(f"{len(seconds)} programs, {sum(seconds):.1f} s", file=sys.stderr, flush=True)

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
    steps = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found["step_seconds"] = [x for step in steps if (x := step.get("performance/step_seconds"))]
    checks = verify(run, again="whole", console=console)
    found |= {"verify": {check.promise: check.verdict for check in checks}}
    return found | {"verify_s": time.perf_counter() - start}


def private(algorithm: str, quick: bool, last: float) -> dict[str, Any]:
    """A run that is killed halfway, resumed, and computed again whole."""
    with tempfile.TemporaryDirectory() as scratch, open(Path(scratch) / "err", "w+") as said:
        run, start = Path(scratch) / "run", time.perf_counter()
        wanted = json.dumps({"place": str(run), "algorithm": algorithm, "quick": quick})
        command = [sys.executable, "-m", "experiments.benchmarks.accelerator", "--child", wanted]
        row: dict[str, Any] = {"part": "private", "algorithm": algorithm, "processes": []}

        def lines() -> int:
            ledger = run / "ledger.jsonl"
            return len(ledger.read_bytes().splitlines()) - 2 if ledger.exists() else 0

        for most in (STEPS[quick] // 2, sys.maxsize):
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as child:
                while child.poll() is None and lines() < most and time.monotonic() < last:
                    time.sleep(0.002)
                ended = {"killed": child.poll() is None, "lines": lines()}
                child.kill()
                out, _ = child.communicate()
            row["processes"].append(ended | {"until_s": time.perf_counter() - start})
        said.seek(0)
        fault = {"fault": f"{child.returncode}: {said.read()[-4000:]}"}
        return row | (fault if child.returncode else json.loads(out.splitlines()[-1]))


def speed(problem: Problem, cell: Cell, program: Any) -> Iterator[dict[str, Any]]:
    """Time a program: the median of three, and whether all results had the same bits."""
    peak = next((p for name, p in PEAKS.items() if name in jax.devices()[0].device_kind), None)
    arguments, times, alike = problem.arguments(cell), [], True
    first = jax.block_until_ready(program(*arguments))
    for _ in range(3):
        start = time.perf_counter()
        again = jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - start)
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
        alike &= all(bool(jnp.array_equal(*pair, equal_nan=True)) for pair in pairs)
        del again
    row, seconds = {"part": "speed", **problem.named(cell)}, statistics.median(times)
    row |= {"seconds": seconds, "gradients_per_s": cell.step / seconds, "same_bits": alike}
    row["temporary_gib"] = program.memory_analysis().temp_size_in_bytes / 2**30
    products = (4 if problem.frozen else 6) * problem.size * cell.step * cell.length
    yield row | {"mfu": products / seconds / peak if peak else None}


def whole_step(problem: Problem, cell: Cell) -> Iterator[dict[str, Any]]:
    """A step of a run: parameters are put on the device, units clipped, their sum is fetched, and
    noise drawn."""
    engine, strategy = LocalEngine(problem.task(cell.length), num_lanes=1), problem.strategy(cell)
    params, rows = jax.device_get(problem.params), np.arange(cell.step).reshape(-1, cell.group)
    while strategy.rows > 1 and engine.faults(params, cell.group, CLIP, strategy)[1]:  # memory
        strategy = dataclasses.replace(strategy, rows=strategy.rows // 2)
    total, _ = engine.clipped_sum(params, rows, CLIP, strategy)  # compiles, and checks
    row = {"part": "step", **problem.named(dataclasses.replace(cell, rows=strategy.rows))}
    total = jax.block_until_ready(jax.device_put(total))
    start = time.perf_counter()
    jax.device_get(total)
    row["fetch_s"], start = time.perf_counter() - start, time.perf_counter()
    jax.block_until_ready(jax.device_put(params))
    row["upload_s"] = time.perf_counter() - start
    sizes = tuple(leaf.size for leaf in jax.tree.leaves(params))
    own: dict[str, Any] = {"noise_multiplier": 1.0, "count": 64.0, "key": SecretKey.create(0)}
    for way in ("seconds", "after_s"):
        kind, start = Correlated(1, 1), time.perf_counter()
        with ThreadPoolExecutor(1) as threads:
            if way == "seconds":
                kind.begin(threads, 1, own["key"], 2.0 ** lattice_bits(sum(sizes)), sizes)
            total, _ = engine.clipped_sum(params, rows, CLIP, strategy)
            summed = time.perf_counter()
            noisy_mean(total, clip=CLIP, step=1, add_noise=kind, **own)
        row |= {way: time.perf_counter() - start, "noise_s": time.perf_counter() - summed}
    row["passes_s"] = row["after_s"] - row["noise_s"] - row["fetch_s"] - row["upload_s"]
    yield row | {"gradients_per_s": cell.step / row["seconds"]}


def places(quick: bool) -> Iterator[dict[str, Any]]:
    """Whether a run on `pydocs` would use the programs of units side by side."""
    data, length = load("pydocs", max_length=MAX_LENGTH), MAX_LENGTH
    every = itertools.product(("direct", "ghost"), ("bfloat16", "float32"))
    for name, dtype in itertools.islice(every, 1 if quick else None):
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


def main(arguments: list[str] | None = None) -> None:
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
        return print(json.dumps(train_and_verify(**given.child)))
    start, limit = time.monotonic(), 60 * given.minutes - 20  # to end, and to write
    faulthandler.dump_traceback_later(limit + 8, exit=True)  # a compiler or the device hangs
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # children need some
    device, quick, parts = jax.devices()[0], given.quick, [x for x in PARTS if x in given.only]
    named, found = models(quick), circumstances("jax", "jaxlib", "flax", "numpy", "fedsim")
    if found["versions"]["fedsim"] == "none":
        sys.exit("fedsim has no package metadata here: expected `pip install -e .` beforehand")
    found["machine"] |= {"device": device.device_kind, "platform": device.platform}
    found["machine"]["runtime"] = device.client.platform_version
    every: dict[str, Any] = {"private": ("uls",) if quick else ("uls", "els"), "step": [*named]}
    every |= {"places": ["pydocs"], "padding": given.data, "speed": [], "others": []}
    for cell in cells([*named], quick):
        every["speed" if cell.strategy == AUTO and not cell.changed else "others"].append(cell)
    todo = {part: every[part] if part in parts else () for part in PARTS}
    last = {part: start + limit * SHARES.get(part, 1.0) for part in PARTS}
    last[parts[-1]] = start + limit
    report = Report(found, given.out, [*named] if todo["speed"] and not quick else [], todo)
    compilers, options = ThreadPoolExecutor(COMPILERS), compiler_options(device.platform)
    problem = functools.cache(lambda model, whole=True: Problem(*named[model], whole))

    def begin(part: str) -> dict[Future, tuple[Problem, Cell]]:
        """Have the cells of a part compiled."""

        def compile_it(lowered: Any) -> Any:
            return lowered.compile(options) if time.monotonic() < last[part] else None

        programs = {}
        for cell in todo[part]:
            with report.guarded(f"{part} {cell}"):
                if time.monotonic() < last[part]:
                    own = problem(cell.model, cell.strategy != "ghost")
                    programs[compilers.submit(compile_it, own.lowered(cell))] = own, cell
        return programs

    def time_all(part: str, programs: dict[Future, tuple[Problem, Cell]]) -> None:
        """Time programs as they are compiled. Each is let go before the next one runs."""
        with contextlib.suppress(TimeoutError):
            for each in as_completed(programs, max(0.0, last[part] - time.monotonic())):
                if time.monotonic() < last[part]:
                    own, cell = programs.pop(each)
                    report.run(f"{part} {cell}", lambda: speed(own, cell, each.result()))  # noqa: B023

    def go_through(part: str, rows: Callable[[Any], Iterable[dict[str, Any]]]) -> None:
        for each in todo[part]:
            if start + limit - time.monotonic() > LEAST[part] * (0.1 if quick else 1.0):
                report.run(f"{part} {each}", functools.partial(rows, each))

    with report.guarded("arithmetic"):
        check_arithmetic(device)
    with ThreadPoolExecutor() as children:
        runs = [(x, children.submit(private, x, quick, last["private"])) for x in todo["private"]]
        programs = begin("speed")
        for kind, run in runs:
            report.run(f"private {kind}", lambda: [run.result()])  # noqa: B023
    time_all("speed", programs)  # no other process runs on the device now
    cell = functools.partial(Cell, length=16 if quick else 128, step=8 if quick else STEP, group=1)
    go_through("step", lambda name: whole_step(problem(name), cell(name)))
    programs = begin("others")  # nothing is timed meanwhile
    go_through("places", lambda _: places(quick))
    go_through("padding", lambda source: padding(source, quick))
    time_all("others", programs)
    found = report.write()
    if given.json:
        print(json.dumps(found), flush=True)


class Report:
    """Rows, and what was left out: in a file after each row."""

    def __init__(self, found: dict[str, Any], out: Path | None, models: list[str], todo: Any):
        """Args: found: machine and versions; models: with aims; todo: what is to be run, by part"""
        self.found, self.out, self.models, self.rows = found, out, models, []
        self.skipped = {f"{part} {each}": "time" for part, items in todo.items() for each in items}

    def write(self) -> dict[str, Any]:
        """Write all that was found, and return it."""
        add_ratios(self.rows)
        whole = {**self.found, "rows": self.rows, "bars": bars(self.rows, self.models)}
        whole["skipped"] = [f"{what}: {why}" for what, why in self.skipped.items()]
        if self.out:
            write_json(self.out, whole)
        return whole

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Go on after a fault of the compiler, the device or the data, and say it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            self.skipped[what] = f"{type(error).__name__}: {str(error)[:300]}"
        self.write()

    def run(self, what: str, rows: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Note rows as they come."""
        with self.guarded(what):
            for row in rows():
                self.rows.append({key: value for key, value in row.items() if value is not None})
                print(json.dumps(self.rows[-1]), file=sys.stderr, flush=True)
                self.write()
            del self.skipped[what]


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add the speed of units over that of the fastest plain gradient like them, if one was timed"""
    like, plain = operator.itemgetter("model", "length", "attention"), {}
    for row in rows:
        if row.get("group") == 0 and row["changed"] != "logits":
            plain[like(row)] = max(row["gradients_per_s"], plain.get(like(row), 0.0))
    for row in rows:
        if row.get("group") and like(row) in plain:
            row["ratio"] = row["gradients_per_s"] / plain[like(row)]


def bars(rows: list[dict[str, Any]], models: Iterable[str]) -> list[dict[str, Any]]:
    """The aims, met or not, or not run: clipped sums by the rule, and plain gradients."""
    found = []
    for length, model, group in itertools.product((128, 1024), models, (1, 4, 16, 0)):
        key, bound = ("ratio", 0.95 if length > 128 else 0.9) if group else ("mfu", 0.4)
        own = {"part": "speed", "model": model, "length": length, "group": group, "changed": ""}
        alike = (row for row in rows if own.items() <= row.items())
        values = [row[key] for row in alike if key in row and not (group and "rows" in row)]
        what = f"{model}, {length:,} tokens, {f'units of {group}' if group else 'plain'}: {key}"
        if group or length > 128:
            found.append(at_least(what, max(values, default=None), bound))
    return found


if __name__ == "__main__":
    main()
    os._exit(0)  # compilers of skipped programs may be at work
