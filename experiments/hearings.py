"""ELS against ULS where texts have two owners: a court's hearings, at one epsilon.

Beyond the paper. A sentence of a hearing belongs to whoever says it and to whom it is said to: the
last other one who spoke. A few judges are in nearly all of them. ELS with several group sizes G
and ULS with several numbers k of groups of others are trained from the same fresh model; so are
both on the same sentences as if each were its speaker's alone, which protects nobody who is spoken
to. Which of the two learns more is reported, and not claimed.

    python -m experiments.hearings --scale small     (3 minutes; smoke: 20 s, made-up hearings)
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from experiments.harness import common
from experiments.harness.rows import Row, Rows
from fedsim.config import Algorithm, PrivacyConfig, run_config
from fedsim.data import build, stats
from fedsim.run import Console, directory
from fedsim.training import train

SOURCE = "scotus"
OWNED = """
COPY (
  WITH said AS (
    SELECT *, lag(user_id) OVER turns AS before FROM read_parquet($file, file_row_number = true)
    WINDOW turns AS (PARTITION BY doc ORDER BY turn, file_row_number))
  SELECT text, list_distinct([user_id, last_value(if(before <> user_id, before, NULL) IGNORE NULLS)
    OVER (PARTITION BY doc ORDER BY turn, file_row_number)]) AS user_id
  FROM said ORDER BY doc, turn, file_row_number
) TO '{file}'
"""
"""A text, its speaker, and the last other one who spoke."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    every: int
    """One in so many hearings is used; 0: made-up ones."""
    num_steps: int
    group_sizes: tuple[int, ...]
    """G of ELS."""
    max_changed: tuple[int, ...]
    """k of ULS."""
    model: str = "tiny"
    epsilon: float = 4.0
    budget: int = 128
    learning_rate: float = 0.1
    max_length: int = 64
    seed: int = 0


JUDGED_AT_SMOKE = False
SETTINGS = {
    "smoke": Settings(0, 2, (2,), (1,), model="micro", budget=8, max_length=24),
    "small": Settings(20, 60, (16, 64, 256), (0, 2, 8)),
    "paper": Settings(1, 500, (16, 64, 256, 1024), (0, 1, 2, 4, 8), budget=512),
}


def made_up() -> pa.Table:
    """Hearings of two judges with an attorney each."""
    rng, rows = np.random.default_rng(0), []
    for doc in range(40):
        for turn in range(6):
            who = f"judge {rng.integers(2)}" if turn % 2 else f"attorney {doc}"
            rows += [
                {"user_id": who, "text": f"words {n}", "doc": f"d{doc:03d}", "turn": turn}
                for n in range(3)
            ]
    return pa.Table.from_pylist(rows)


def real(every: int) -> pa.Table:
    """One in so many hearings of the court."""
    table = pq.read_table(common.shared(SOURCE))
    docs = pa.array(sorted(pc.unique(table["doc"]).to_pylist())[::every])  # pyright: ignore
    return table.filter(pc.is_in(table["doc"], docs))  # pyright: ignore


def run(settings: Settings) -> Rows:
    """A row for each training."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        table = real(settings.every) if settings.every else made_up()
        source = Path(place) / "hearings.parquet"
        pq.write_table(table, source)
        owned = source.with_name("owned.parquet")
        duckdb.execute(OWNED.format(file=owned), {"file": str(source)})
        built = {
            name: build(file, Path(place) / name, max_length=settings.max_length)
            for name, file in (("owners", owned), ("speaker", source))
        }
        shared = stats(built["owners"].train)
        several = shared["examples_with_several_owners"] / shared["num_examples"]
        own = built["speaker"].train
        median = max(1, int(np.median(own.examples_per_user)))
        cases = [("owners", "els", {"group_size": size}) for size in settings.group_sizes]
        cases += [("owners", "uls", {"max_shared_groups": k}) for k in settings.max_changed]
        cases += [("speaker", "els", {"group_size": median}), ("speaker", "uls", {})]
        for number, (name, algorithm, changes) in enumerate(cases):
            rows.append(
                _trained(settings, built[name], Path(place) / f"run{number}", algorithm, changes)
            )
            about = {"texts_belong_to": name, "fingerprint": built[name].train.fingerprint}
            rows[-1] |= {**about, "share_with_several_owners": several if name == "owners" else 0.0}
    return rows


def _trained(
    settings: Settings, data: Any, run_dir: Path, algorithm: str, changes: dict[str, Any]
) -> dict[str, Any]:
    privacy = PrivacyConfig(
        epsilon=settings.epsilon,
        num_steps=settings.num_steps,
        batch_size=settings.budget,
        **changes,
    )
    run = run_config(
        data=str(data.path),
        run_dir=run_dir,
        model=settings.model,
        engine="local",
        learning_rate=settings.learning_rate,
        seed=settings.seed,
        strategy="scan",
        rows_per_pass=1,
    )
    summary = train(Algorithm(algorithm), privacy, run, Console())
    plan = directory.load(run_dir).plan
    assert plan is not None
    shared = summary.get("shared") or {"kept": data.train.num_examples, "left_out": 0}
    return {
        "algorithm": algorithm.upper(),
        "group_size": summary["group_size"],
        "max_changed": changes.get("max_shared_groups", 0),
        "users": summary["num_users"],
        "texts": summary["num_examples"],
        "texts_left_out": shared["left_out"],
        "units": summary["num_units"],
        "num_parameters": plan.num_parameters,
        "noise_multiplier": summary["noise_multiplier"],
        "noise_per_step": summary["noise_multiplier"] / summary["expected_count"],
        "loss_before": summary["initial_eval_loss"],
        "loss": summary["final_eval_loss"],
    }


def check(rows: Rows) -> common.Claims:
    """What is said of shared texts in general."""
    shared = [row for row in rows if row["texts_belong_to"] == "owners"]
    left_out = [row["texts_left_out"] / row["texts"] for row in shared]
    numbers = ", ".join(f"{share:.1%}" for share in left_out)
    uls = [row for row in shared if row["algorithm"] == "ULS"]
    noise = [row["noise_per_step"] for row in sorted(uls, key=lambda row: row["max_changed"])]
    best = {
        name: min(row["loss"] for row in shared if row["algorithm"] == name)
        for name in ("ELS", "ULS")
    }
    return [
        ("both bounds leave out texts", min(left_out) > 0, numbers),
        (
            "every group of others costs noise",
            noise == sorted(noise),
            ", ".join(f"{value:.4g}" for value in noise),
        ),
        (
            "the better of the two is below the loss before",
            min(best.values()) < rows[0]["loss_before"],
            f"before {rows[0]['loss_before']:.3f}, ELS {best['ELS']:.3f}, ULS {best['ULS']:.3f}",
        ),
    ]


def origins(settings: Settings, rows: Rows) -> dict[str, Any]:
    """The file, and what was built of it, by whom its texts belong to."""
    files = common.files_of([SOURCE] if settings.every else [])
    built = {row["texts_belong_to"]: row["fingerprint"] for row in rows}
    return {name: {**file, "fingerprints": built} for name, file in files.items()}


def plot(rows: Rows) -> Figure:
    """Loss against the share of the texts that is used. What ends above the loss before training is
    in a panel of its own, on its own scale."""
    before = max(row["loss_before"] for row in rows)
    worse = any(row["loss"] > before for row in rows)
    ratios = [1, 2.5] if worse else [1]
    shape = {"figsize": (6, 3.4 + worse), "sharex": True, "squeeze": False}
    figure, axes = plt.subplots(len(ratios), 1, height_ratios=ratios, layout="constrained", **shape)
    above, below = axes[0, 0], axes[-1, 0]
    if worse:
        line = {"color": "black", "linestyle": ":", "label": "before training"}
        above.axhline(before, **line)
    for row in rows:
        algorithm, own = row["algorithm"], row["texts_belong_to"] == "speaker"
        axis, at = above if row["loss"] > before else below, _used(row)
        what = "speaker's alone" if own else "two owners"
        label = f"{algorithm}, {what}"
        look = {"color": common.COLOURS[algorithm], "label": label}
        axis.plot(at, row["loss"], "x" if own else "o", **look)
        if own:
            continue
        els = algorithm == "ELS"
        text = f"G = {row['group_size']}" if els else f"k = {row['max_changed']}"
        off = {"textcoords": "offset points", "xytext": (0, 7 if els else -14), "ha": "center"}
        axis.annotate(text, (at, row["loss"]), fontsize="small", **off)
    below.set(xlabel="share of the texts that is used", xlim=(-0.03, 1.06))
    below.margins(y=0.2)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
    if worse:
        above.margins(y=0.35)
        above.set_title(
            "broken axis: the upper part has a scale of its own", fontsize="small", color="dimgray"
        )
    figure.supylabel("held-out loss (nats per token)", fontsize="medium")
    common.legend_below(figure)
    return figure


def _used(row: Row) -> float:
    """The share of the texts that a training used. Units of ELS are texts."""
    kept = row["texts"] - row["texts_left_out"]
    return (row["units"] if row["algorithm"] == "ELS" else kept) / row["texts"]


def described(settings: Settings, rows: Rows) -> dict[str, Any]:
    """The model, which is fresh."""
    return {"source": f"{settings.model}, fresh", "num_parameters": rows[0]["num_parameters"]}


if __name__ == "__main__":
    common.main(globals())
