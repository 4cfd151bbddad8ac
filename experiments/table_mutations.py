"""The classic mistakes of private training, planted in a copy of fedsim: what notices each?

Claim: each is caught, by a test, by `fedsim verify --replay` on what the broken code trained (run
with the code as it is), by the audit's lower bound, or by several of these. `smoke` plants two and
asks the tests, `small` plants all and asks the tests, `paper` asks all three.

    python -m experiments.table_mutations --scale paper
"""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments import common

ROOT = Path(__file__).parents[1]
AUDIT = "tests/test_audit.py::test_the_bound_is_below_the_claim"
NOISE = "key=self.key, step=step)"
BOTH = ("els.py", "uls.py")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mistake: the edits that make it, and the test file that should notice."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    """(file under fedsim/, text, what it becomes)."""
    tests: str
    flags: tuple[str, ...] = ()
    """Of the training that shows it."""


def both(old: str, new: str) -> tuple[tuple[str, str, str], ...]:
    """The same edit in both algorithms."""
    return tuple((file, old, new) for file in BOTH)


CLIP_THE_SUM = """        norm = np.sqrt(sum(float(np.sum(x**2)) for x in jax.tree.leaves(total)))
        factor = min(1.0, clip.norm * max(len(rows), 1) / max(norm, 1e-30))
        factor = np.float32(factor / (clip.norm if clip.normalised else 1.0))
        return jax.tree.map(lambda x: factor * x, total), joined
"""

MUTATIONS = (
    Mutation(
        "a tenth of the noise",
        (("mechanism.py", "noisy *= stddev", "noisy *= 0.1 * stddev"),),
        "test_mechanism.py",
    ),
    Mutation(
        "noise of the mean, divided once more",
        (("mechanism.py", "noisy *= stddev", "noisy *= stddev / count"),),
        "test_mechanism.py",
    ),
    Mutation(
        "the same noise for all layers",
        (("mechanism.py", "step, leaf, number)", "step, 0, number)"),),
        "test_mechanism.py",
    ),
    Mutation(
        "no clipping",
        (
            (
                "clipping/clip.py",
                "factor = jnp.minimum(jnp.float32(1), jnp.float32(self.norm) / "
                "jnp.maximum(norms, TINY))",
                "factor = jnp.ones_like(norms)",
            ),
        ),
        "test_clipping.py",
    ),
    Mutation(
        "clipping after the sum over users",
        (
            ("engine/engine.py", "self.cut(rows), clip, self", "self.cut(rows), Clip(1e30), self"),
            ("engine/engine.py", "        return total, joined\n", CLIP_THE_SUM),
        ),
        "test_uls.py",
    ),
    Mutation(
        "a gradient that is not finite passes",
        (
            (
                "clipping/clip.py",
                "jnp.where(jnp.isfinite(norms), factor, jnp.float32(0))",
                "factor",
            ),
        ),
        "test_clipping.py",
    ),
    Mutation(
        "sensitivity C after scaling to norm 1",
        (
            (
                "clipping/clip.py",
                "return 1.0 if self.normalised else self.norm",
                "return self.norm",
            ),
        ),
        "test_uls.py",
        ("--clip-norm", "0.1"),
    ),
    Mutation(
        "division by the realised number",
        (
            ("els.py", "count = self.expected_batch_size", "count = max(1, len(rows))"),
            ("uls.py", "count = self.expected_cohort_size", "count = max(1, len(rows))"),
        ),
        "test_uls.py",
    ),
    Mutation(
        "fresh noise when a step is run again",
        both(NOISE, 'key=self.key, step=__import__("time").time_ns())'),
        "test_uls.py",
    ),
    Mutation(
        "the same noise in every step",
        both(NOISE, "key=self.key, step=0)"),
        "test_uls.py",
    ),
    Mutation(
        "the cap on a user's examples ignored",
        (("sampling.py", "np.diff(offsets) > group_size)", "np.diff(offsets) > 10**9)"),),
        "test_sampling.py",
    ),
    Mutation(
        "the cap on a user's examples not accounted",
        (("els.py", "max_contributions=self.group_size", "max_contributions=1"),),
        "test_els.py",
    ),
    Mutation(
        "draws of a fixed size, accounted as Poisson",
        (
            (
                "sampling.py",
                "count = rng.binomial(self.num_units, self.sampling_prob)",
                "count = self.expected_count",
            ),
        ),
        "test_sampling.py",
    ),
    Mutation(
        "shuffling, reported as Poisson",
        (("plan.py", "sampling_run=method.sampler.name", 'sampling_run="poisson"'),),
        "test_plan.py",
        ("--sampling", "shuffle"),
    ),
    Mutation(
        "noise calibrated for half of the steps",
        (
            (
                "plan.py",
                "num_steps=privacy.num_steps,\n            s",
                "num_steps=-(-privacy.num_steps // 2),\n            s",
            ),
        ),
        "test_plan.py",
    ),
    Mutation(
        "epsilon copied from the target",
        (
            (
                "train.py",
                "epsilon = released_epsilon(self.run.run_dir, self.plan.delta)",
                "epsilon = self.plan.target_epsilon / 2",
            ),
        ),
        "test_train.py::test_epsilon_comes_from_the_ledger",
    ),
    Mutation(
        "a norm in half precision underflows",
        (("clipping/clip.py", "jnp.square(leaf.astype(jnp.float32))", "jnp.square(leaf)"),),
        "test_clipping.py",
    ),
)
SMOKE = MUTATIONS[:1] + MUTATIONS[10:11]


def plant(mutation: Mutation, directory: Path) -> Path:
    """A copy of the project with the mistake in it. Raises: ValueError: the code has changed."""
    copy = directory / "planted"
    shutil.rmtree(copy, ignore_errors=True)
    for name in ("fedsim", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy / name)
    for file, old, new in mutation.edits:
        path = copy / "fedsim" / file
        text = path.read_text()
        if old not in text:
            raise ValueError(f"mutation={mutation.name}: expected {old!r} in {file}")
        path.write_text(text.replace(old, new))
    return copy


def python(where: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Python in a directory whose fedsim it imports."""
    environment = {**os.environ, "PYTHONPATH": str(where), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *args], cwd=where, env=environment, capture_output=True, text=True
    )


def tests_say(copy: Path, tests: str) -> str:
    """The first test that fails, or "-"."""
    options = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not ray")
    done = python(copy, "-m", "pytest", *options, f"tests/{tests}" if "/" not in tests else tests)
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return failed[1].removeprefix("tests/").partition("[")[0]
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return "-"


def verify_says(copy: Path, mutation: Mutation, directory: Path) -> str:
    """The promises that `verify --replay`, of the code as it is, finds broken, or "-"."""
    broken: set[str] = set()
    for algorithm in ("els", "uls"):
        run_dir = directory / f"run-{algorithm}"
        shutil.rmtree(run_dir, ignore_errors=True)
        settings = (
            f"train {algorithm} --data {directory / 'texts.parquet'} --run-dir {run_dir} "
            "--epsilon 4 --num-steps 6 --budget 24 --group-size 2 --max-length 24 --engine local "
            "--checkpoint-every 2 --strategy scan:2 --eval-every 3"
        )
        trained = python(copy, "-m", "fedsim.cli", *settings.split(), *mutation.flags)
        if trained.returncode:
            raise RuntimeError(trained.stderr[-2000:])
        done = python(ROOT, "-m", "fedsim.cli", "verify", str(run_dir), "--replay")
        broken |= set(re.findall(r"^VIOLATED\s+(\w+)", done.stdout, re.MULTILINE))
    return " ".join(sorted(broken)) or "-"


def write_texts(path: Path) -> None:
    """Texts of 40 users, the more the later."""
    rng = np.random.default_rng(0)
    users = [f"user{u}" for u in range(40) for _ in range(1 + u // 5)]
    texts = [" ".join(rng.choice(["red", "green", "blue", "grey"], 4)) for _ in users]
    pq.write_table(pa.table({"user_id": users, "text": texts}), path)


def main() -> None:
    """Plant, ask, and write the table; fails unless every mistake is caught."""
    scale, out = common.parse_arguments(__doc__)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_texts(directory / "texts.parquet")
        for mutation in SMOKE if scale == "smoke" else MUTATIONS:
            copy = plant(mutation, directory)
            row = {"mistake": mutation.name, "test": tests_say(copy, mutation.tests)}
            everything = scale == "paper"
            row["verify"] = verify_says(copy, mutation, directory) if everything else "not asked"
            row["audit"] = "not asked"
            if everything:
                row["audit"] = "bound above the claim" if tests_say(copy, AUDIT) != "-" else "-"
            rows.append(row)
            print(*row.values(), sep=" | ", flush=True)
    common.write_csv(out / "table_mutations.csv", rows)
    check(rows)


def check(rows: list[dict[str, str]]) -> None:
    """Every mistake is caught by something."""
    missed = [row["mistake"] for row in rows if not caught(row)]
    assert not missed, f"nothing noticed: {missed}"


def caught(row: dict[str, str]) -> bool:
    """Whether something noticed."""
    return any(row[name] not in ("-", "not asked") for name in ("test", "verify", "audit"))


if __name__ == "__main__":
    main()
