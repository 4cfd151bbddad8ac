"""The Ray engine: what it costs beside gradients, how it scales, and what it survives.

    python -m experiments.benchmarks.engine [--quick] [--json]     (15 minutes; quick: 45 s)

overhead   a step with gradients that cost nothing: draw, lanes, parameters out, sums back and added
scaling    a transformer's step with one worker and with two, beside two processes without Ray
large      a transformer of 100 MB: how much of a step is not gradient computation
lm         pfl's Stack Overflow shape (`shape.py`), clipped per user; and the parameters' hash after
           private rounds with 1, 2 and 4 workers
fault      a process exits in the second of five rounds

The rows of pfl, FedJAX and Flower in the record are of scripts that docs/lab/performance.md names.
"""

import dataclasses
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any

os.environ |= {"NPROC": "1", "JAX_PLATFORMS": "cpu"}  # before JAX starts its client

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import shape
from experiments.benchmarks.common import parser_of, write
from experiments.harness.mean_task import MeanTask
from fedsim.clipping import Clip
from fedsim.config import EngineConfig
from fedsim.engine import Stats, Task, Worker, ray_engine
from fedsim.engine.cluster import Cluster
from fedsim.engine.ray_engine import RayEngine
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.models import Transformer, TransformerConfig
from fedsim.models.language_model import next_token_nats
from fedsim.run.checkpoint import params_sha256
from fedsim.sampling import Poisson, draw_groups

COHORT = 1024  # of the paper's Stack Overflow runs
NUM_USERS = (1_000, 20_000, 342_477)
CLIP = Clip(shape.CLIP)


class NoGradient(Worker):
    """A worker whose gradients are zero and cost nothing; its sums have the model's size."""

    def lane_sum(self, version, params, rows, clip, *_):
        self.programs.on_device(version, params)
        if not hasattr(self, "_zeros"):
            self._zeros = np.zeros(params.shape, np.float32)
        values = (np.zeros(len(rows), kind) for kind in (np.float32, np.float32, bool, np.int64))
        return self._zeros, Stats(*values)


class Timed(Worker):
    """A worker that reports the seconds of a lane in the place of its units' losses."""

    def lane_sum(self, *args):
        started = time.perf_counter()
        total, stats = super().lane_sum(*args)
        seconds = np.full(len(stats.losses), time.perf_counter() - started, np.float32)
        return total, dataclasses.replace(stats, losses=seconds)


class Tokens(Task):
    """A transformer on random tokens: 64 of them in each of 4,096 rows."""

    def __init__(self, width: int, layers: int, vocabulary: int):
        self.model = Transformer(TransformerConfig(vocabulary, 64, width, layers, 8))
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(vocabulary, size=(4096, 64)).astype(np.int32)

    def init(self, key: jax.Array) -> Any:
        return self.model.init(key, self.tokens[:1])["params"]

    def read(self, split, rows):
        return {"tokens": self.tokens[rows], "sizes": np.full(len(rows), 64)}

    def losses(self, params, batch):
        nats, count = next_token_nats(self.model, params, batch["tokens"], batch["sizes"])
        return nats / count


class Sentences(Task):
    """pfl's shape; a row is a sentence."""

    def __init__(self):
        self.tokens, self.offsets = shape.sentences()

    def read(self, split, rows):
        return self.tokens[rows]

    def losses(self, params, batch):
        return shape.losses(params, batch)

    def init(self, key: jax.Array) -> Any:
        return jax.tree.map(jnp.asarray, shape.initial())

    def rows(self, cohort):
        rows = np.full((len(cohort), shape.MAX_SENTENCES), -1)
        for row, user in zip(rows, cohort, strict=True):
            start, end = self.offsets[user : user + 2]
            row[: end - start] = np.arange(start, end)
        return rows


class Fused(MeanTask):
    """Mean estimation; the first who finds the fuse takes it away, and its process exits."""

    def __init__(self, fuse: str):
        super().__init__(np.random.default_rng(0).normal(size=(20, 10)))
        self.fuse = fuse

    def read(self, split, rows):
        with suppress(FileNotFoundError):
            os.unlink(self.fuse)
            os._exit(1)
        return super().read(split, rows)


def pool(task, num_workers: int, num_lanes: int = 8, worker: type = Worker) -> RayEngine:
    ray_engine.Worker = worker
    engine = RayEngine(task, EngineConfig("ray", num_lanes=num_lanes, num_workers=num_workers))
    engine.ready()
    return engine


def overhead(quick: bool) -> list[dict]:
    rows = []
    for model, floats in list(shape.MODEL_FLOATS.items())[: 2 if quick else 3]:
        lanes = 8 if floats < 10_000_000 else 2
        engine = pool(MeanTask(np.zeros((1, 1))), 2, lanes, NoGradient)
        for num_users in NUM_USERS:
            offsets = np.arange(num_users + 1, dtype=np.int64) * 20
            sampler, key = Poisson(num_users, min(COHORT, num_users // 2)), SecretKey.create(0)
            seconds, units = [], []
            for step in range(4 if quick else 8):
                params = jnp.full(floats, step, jnp.float32).block_until_ready()
                started = time.perf_counter()
                groups = draw_groups(offsets, sampler.draw(key, step), 4, key, step)
                engine.clipped_sum(params, groups, CLIP)
                seconds.append(time.perf_counter() - started)
                units.append(len(groups))
            per_user = [1e3 * s / n for s, n in zip(seconds, units, strict=True)][2:]
            rows.append(
                {
                    **{"name": "overhead", "model": model, "num_users": num_users},
                    **{"lanes": lanes, "cohort": statistics.median(units)},
                    "first_s": seconds[0],
                    "ms_per_user": statistics.median(per_user),
                }
            )
            show(rows[-1])
        engine.close()
    return rows


def scaling(quick: bool) -> list[dict]:
    """Two workers over one, beside what the machine has to give: two bare processes that do the
    same, each half of it, and two that multiply matrices. All take turns."""
    size = (128, 2, 1000) if quick else (192, 4, 4000)
    task = Tokens(*size)
    params = task.init(jax.random.key(0))
    rows = np.random.default_rng(1).integers(4096, size=(32 if quick else 96, 4))
    engines = {n: pool(task, n) for n in (1, 2)}
    products = 4 if quick else 60
    seconds: dict[tuple[str, int], list[float]] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as first, ProcessPoolExecutor(1, spawn) as second:

        def halves(function: Any, *parts: Any) -> None:
            begun = [
                each.submit(function, *part)
                for each, part in zip((first, second), parts, strict=False)
            ]
            for future in begun:
                future.result()

        half = len(rows) // 2
        todo = {
            ("engine", 1): lambda: engines[1].clipped_sum(params, rows, CLIP),
            ("engine", 2): lambda: engines[2].clipped_sum(params, rows, CLIP),
            ("sums", 1): lambda: halves(bare_sum, (size, rows)),
            ("sums", 2): lambda: halves(bare_sum, (size, rows[:half]), (size, rows[half:])),
            ("products", 1): lambda: halves(bare_products, (2 * products,)),
            ("products", 2): lambda: halves(bare_products, (products,), (products,)),
        }
        for repeat in range(3 if quick else 7):
            for name, run_it in todo.items():
                started = time.perf_counter()
                run_it()
                if repeat:  # the first compiles
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
    for engine in engines.values():
        engine.close()
    row: dict[str, Any] = {"name": "scaling"}
    for what in ("engine", "sums", "products"):
        one, two = seconds[what, 1], seconds[what, 2]
        row |= {f"{what}_1_s": statistics.median(one), f"{what}_2_s": statistics.median(two)}
        ratios = [a / b for a, b in zip(one, two, strict=True)]
        row |= {f"{what}_speedup": statistics.median(ratios), f"{what}_ratios": ratios}
    for what in ("sums", "products"):
        row[f"of_{what}"] = row["engine_speedup"] / row[f"{what}_speedup"]
    show(row)
    return [row]


@functools.cache
def bare(size: tuple[int, int, int]) -> tuple[LocalEngine, Any]:
    """(An engine without Ray, parameters), in a process of its own."""
    task = Tokens(*size)
    return LocalEngine(task, num_lanes=8), task.init(jax.random.key(0))


def bare_sum(size: tuple[int, int, int], rows: np.ndarray) -> None:
    """The clipped sum of these users, in this process."""
    engine, params = bare(size)
    engine.clipped_sum(params, rows, CLIP)


def bare_products(count: int) -> None:
    """So many products of matrices of 1,024 x 1,024, in this process."""
    value = matrix = jnp.full((1024, 1024), 1e-3)
    for _ in range(count):
        value = value @ matrix
    value.block_until_ready()


def large(quick: bool) -> list[dict]:
    """Of two workers' seconds in a step, those in which they did not compute a lane's sum."""
    task = Tokens(512, 7, 6000)
    params = task.init(jax.random.key(0))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    rows = np.random.default_rng(1).integers(4096, size=(32, 2))
    engine = pool(task, 2, 2, Timed)
    update = jax.jit(lambda p, g: jax.tree.map(lambda a, b: a - 1e-3 * b, p, g))
    shares = []
    for step in range(4):
        started = time.perf_counter()
        grad_sum, stats = engine.clipped_sum(params, rows, CLIP)
        noise = {"clip": CLIP, "noise_multiplier": 0.1, "key": SecretKey.create(0), "step": step}
        grad = noisy_mean(grad_sum, count=32, **noise).values()
        params = jax.block_until_ready(update(params, grad))
        seconds = time.perf_counter() - started
        shares.append(1 - float(stats.losses.max()) / seconds)
        row = {"name": "large", "model_mb": num_bytes / 1e6, "step_s": seconds}
    engine.close()
    row["outside_gradients"] = statistics.median(shares[1:])
    show(row)
    return [row]


def lm(quick: bool) -> list[dict]:
    """Seconds of a private round, and the hash after all of them."""
    rounds, rows = 1 if quick else 5, []
    for num_workers in (1, 2) if quick else (1, 2, 4):
        seconds, digest = private_rounds(num_workers, rounds)
        rows.append({"engine": "fedsim", "processes": num_workers, "seconds": seconds})
        rows[-1]["sha256"] = digest
    for row in rows:
        row |= {"name": "lm", "round_s": statistics.median(row["seconds"][1:])}
        show(row)
    return rows


def private_rounds(num_workers: int, rounds: int) -> tuple[list[float], str]:
    task = Sentences()
    engine = pool(task, num_workers)
    params = task.init(jax.random.key(0))
    update = jax.jit(lambda p, g: jax.tree.map(lambda a, b: a - shape.LEARNING_RATE * b, p, g))
    seconds = []
    for step, cohort in enumerate(shape.cohorts(rounds + 1)):
        started = time.perf_counter()
        grad_sum, _ = engine.clipped_sum(params, task.rows(cohort), CLIP)
        noise = {"clip": CLIP, "noise_multiplier": shape.NOISE, "step": step}
        key = SecretKey.create(0)
        grad = noisy_mean(grad_sum, count=shape.COHORT, key=key, **noise).values()
        params = jax.block_until_ready(update(params, grad))
        seconds.append(time.perf_counter() - started)
    engine.close()
    return seconds, params_sha256(params)


def fault(quick: bool) -> list[dict]:
    """Answers of each of five rounds of 20 users, in the second of which a process exits."""
    results = []
    for broken in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            fuse = os.path.join(directory, "fuse")
            engine = pool(Fused(fuse), 2)
            params, answers = jnp.zeros(10), []
            for number in range(1, 6):
                if broken and number == 2:
                    open(fuse, "w").close()
                total, stats = engine.clipped_sum(params, np.arange(20)[:, None], CLIP)
                params = params - 0.1 * jnp.asarray(total)
                answers.append(len(stats.norms))
            results.append((answers, params_sha256(params), engine.redispatched))
            engine.close()
    (quiet, digest, _), (answers, found, redispatched) = results
    row = {"name": "fault", "engine": "fedsim", "answers": answers, "redispatched": redispatched}
    rows = [{**row, "same_parameters": found == digest and answers == quiet}]
    show(rows[0])
    return rows


def bars(rows: list[dict]) -> list[dict]:
    """What the project asks of its engine, as far as it was measured."""
    by_name: dict[str, list[dict]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    found = []

    def bar(name: str, value: float, bound: float, at_most: bool = True) -> None:
        holds = value <= bound if at_most else value >= bound
        found.append({"name": name, "value": value, "bound": bound, "holds": bool(holds)})

    if costs := by_name.get("overhead"):
        bar("overhead, ms per user, most", max(row["ms_per_user"] for row in costs), 0.5)
        flat = [row["ms_per_user"] for row in costs if row["model"] == "4 kB"][1:]
        bar("overhead at 342,477 users over that at 20,000", flat[1] / flat[0], 1.5)
    if scaled := by_name.get("scaling"):
        what = "two workers over one, of what two bare processes come to"
        bar(what, scaled[0]["of_sums"], 0.95, at_most=False)
    if big := by_name.get("large"):
        bar("share of a 100 MB step outside gradients", big[0]["outside_gradients"], 0.15)
    if same := by_name.get("lm"):
        hashes = {row["sha256"] for row in same if row["engine"] == "fedsim"}
        bar("hashes for different numbers of workers", len(hashes), 1)
    if faults := by_name.get("fault"):
        bar("a lost process changes nothing", float(faults[0]["same_parameters"]), 1, at_most=False)
    return found


def show(row: dict) -> None:
    shown = {
        key: f"{value:.4g}" if isinstance(value, float) else value
        for key, value in row.items()
        if key not in ("name", "seconds", "sha256")
        and not key.endswith("ratios")
        and value is not None
    }
    print(row["name"] + ":", *(f"{k} {v}" for k, v in shown.items()), file=sys.stderr, flush=True)


SECTIONS = {f.__name__: f for f in (overhead, scaling, large, lm, fault)}


def main() -> None:
    parser = parser_of(__doc__, "small")
    parser.add_argument("--only", choices=SECTIONS, nargs="*", default=list(SECTIONS))
    arguments = parser.parse_args()
    cluster, rows = Cluster(num_cpus=8), []
    skipped = {"large", "lm"} if arguments.quick else set()
    for name in arguments.only:
        if name not in skipped:
            rows += SECTIONS[name](arguments.quick)
    cluster.close()
    write(bars(rows), ("fedsim", "jax", "jaxlib", "numpy", "ray"), arguments.json, rows=rows)


if __name__ == "__main__":
    main()
