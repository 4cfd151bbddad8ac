"""Does the search for training users' texts in synthetic text notice a training that is wrong?

Beyond the paper. A small model is trained until it knows its users' texts by heart, unless clipping
and noise keep it from that: at epsilon 1 and 8, and without noise; each as it should be, and with
the gradients not clipped (a mistake that is planted). Then it samples texts, in
which the search looks for what training users and, as a control, held-out users wrote. Each user
wrote the beginning of one docstring. Claims (`synthetic_claims`, committed before the runs): the
search is silent on right trainings with noise, and alarms on those without noise or clipping.

    python -m experiments.synthetic_leaks --scale small     (12 minutes of a busy machine)
"""

import dataclasses
import itertools
import math
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.harness import common
from experiments.harness.planting import Patch
from experiments.harness.rows import Rows
from experiments.synthetic_claims import NO_CLIPPING, NONE, check_leaks as check, plot_leaks as plot
from fedsim.data import Dataset, Tokenizer, build, corpora


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    num_users: int = 120
    """Half of them, about, are held out."""
    num_steps: int = 300
    model: str = "tiny"
    epsilons: tuple[float, ...] = (1.0, 8.0, math.inf)
    clip_norm: float = 0.01
    """C, so far below the norms of gradients that without clipping the noise hides nothing. A trial
    with 0.1 was silent without clipping at epsilon 1 and 8: of 3 in 57 users some was found."""
    learning_rate: float = 0.003
    """Of Adam, for which the scale of the gradients does not matter."""
    num_texts: int = 2_000
    num_chars: int = 60
    """Of a user's text."""
    lengths: tuple[int, ...] = (16, 32)
    """Of the runs that are looked for, in tokens, which are bytes."""
    seed: int = 0


SETTINGS = {
    "smoke": Settings(num_users=16, num_steps=2, model="micro", num_texts=32, epsilons=(8.0,)),
    "small": Settings(),
    "paper": Settings(num_users=1_000, num_steps=2_000, num_texts=20_000),
}


def built(settings: Settings, directory: Path) -> Dataset:
    """Users with a text each: the beginnings of docstrings of packages that are installed."""
    source = corpora.load("pydocs").train
    tokenizer, rng = Tokenizer.bytes(), np.random.default_rng(settings.seed)
    users = rng.choice(source.num_users, settings.num_users, replace=False)
    tokens, sizes = source.gather(source.offsets[:-1][users], settings.num_chars + 1)
    texts = [tokenizer.decode(row[:size]) for row, size in zip(tokens, sizes, strict=True)]
    file = directory / "texts.parquet"
    pq.write_table(pa.table({"user_id": [f"u{u}" for u in users], "text": texts}), file)
    own = {"max_length": settings.num_chars + 2, "eval_users": 0.5, "eval_examples": False}
    return build(file, directory / "data", num_workers=1, **own)


def train(settings: Settings, source: str, epsilon: float, mistake: str, run_dir: Path) -> Any:
    """The summary of a run. In a process of its own, in which the mistake is planted.

    fedsim tries each compiled program with hostile gradients and would refuse one that does not
    clip, so that the mistake is planted in the trial, too.
    """
    from fedsim.config import Algorithm, PrivacyConfig, run_config
    from fedsim.run import Console
    from fedsim.training import train

    for patch in PLANTED[mistake]:
        patch.plant()
    run = run_config(
        data=source,
        run_dir=run_dir,
        model=settings.model,
        optimizer="adam",
        learning_rate=settings.learning_rate,
        strategy="direct:8",
        engine="local",
        seed=settings.seed,
        eval_every=settings.num_steps,
        checkpoint_every=settings.num_steps,
        budget_ledger=str(run_dir.parent / "ledger"),
    )
    privacy = PrivacyConfig(
        epsilon,
        settings.num_steps,
        Dataset.open(source).train.num_users,
        delta=1e-3,
        group_size=1,
        clip_norm=settings.clip_norm,
    )
    return train(Algorithm.ULS, privacy, run, Console())


def unclipped(right: Any, bound: Any, real: Any, clip: Any, dimensions: int) -> Any:
    """The factor of a gradient as if its norm were zero."""
    import jax.numpy as jnp

    return right(jnp.where(jnp.isfinite(bound), 0, bound), real, clip, dimensions)


PLANTED = {
    NONE: (),
    NO_CLIPPING: (
        Patch("fedsim.clipping.contribution", "factor", unclipped),
        Patch("fedsim.engine.programs", "_check_contributions", lambda right, *args: None),
    ),
}


def run(settings: Settings) -> Rows:
    """A row for each training and each length of a run of tokens."""
    from fedsim.config import EngineConfig, Sampling, Synthesis
    from fedsim.run import Console
    from fedsim.synthesis import search, store_of, synthesize

    local = EngineConfig(kind="local")
    own = {"mp_context": multiprocessing.get_context("spawn"), "max_tasks_per_child": 1}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(1, **own) as pool:
        data = built(settings, Path(scratch))
        for mistake, epsilon in itertools.product((NONE, NO_CLIPPING), settings.epsilons):
            run_dir = Path(scratch) / f"{mistake} {epsilon}".replace(" ", "-") / "run"
            cell = settings, str(data.path), epsilon, mistake, run_dir
            summary = pool.submit(train, *cell).result()
            wanted = Synthesis(settings.num_texts, settings.num_chars, seed=settings.seed)
            where = run_dir.parent / "synthetic.parquet", wanted, Sampling(), local, Console()
            file = synthesize(str(run_dir), *where)["file"]
            texts = pq.read_table(file, columns=["text"]).to_pylist()
            found = search(store_of(texts, data), data, lengths=settings.lengths)
            for row in found["users"]:
                rows.append(
                    {
                        "mistake": mistake,
                        "epsilon": epsilon,
                        "length": row["length"],
                        "alarm": found["alarm"],
                        "p_value": row["p_value"],
                        **{f"{name}_in": row[name][0] for name in BOTH},
                        **{f"{name}_out": row[name][1] for name in BOTH},
                        "low": row["low"],
                        "high": row["high"],
                        "loss_before": summary["initial_eval_loss"],
                        "loss": summary["final_eval_loss"],
                        "noise_multiplier": summary["noise_multiplier"],
                        "num_parameters": summary["num_parameters"],
                        "texts": len(texts),
                        "fingerprint": data.train.fingerprint[:12],
                    }
                )
            print(*rows[-1].values(), flush=True)
    return rows


BOTH = ("users", "users_found", "runs_found", "texts_found")
"""Figures of users who were trained on, and who were not."""


if __name__ == "__main__":
    common.main(
        *("synthetic_leaks", __doc__, SETTINGS, run, check),
        {"synthetic_leaks": plot},
        always=False,
        data=lambda own, rows: {"pydocs": rows[0]["fingerprint"]},
        model=lambda own, rows: {
            "source": f"{own.model}, fresh",
            "num_parameters": rows[0]["num_parameters"],
        },
    )
