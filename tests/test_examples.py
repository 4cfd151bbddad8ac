"""The examples are true: programs print what they should, and notebooks run to their end."""

import dataclasses
import hashlib
import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path

import jax
import nbformat
import numpy as np
import optax
import pytest
from chats import model_files
from nbclient import NotebookClient
from pretrained_models import CONFIG
from zoo import save_model

import fedsim
from fedsim.data import Tokenizer
from fedsim.data.building.build import build
from fedsim.models.transformer import Transformer
from fedsim.sampling import Sampling
from fedsim.uls import ULS

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def run(monkeypatch, name: str, *arguments: str) -> dict:
    """Run a program as from a shell, in this process; returns its names."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def numbers(text: str) -> list[float]:
    """The numbers in a text, in order."""
    return [float(found) for found in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)]


# ---- Programs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_uls_by_hand_has_the_bits_of_uls(monkeypatch, capsys):
    steps = 2
    found = run(monkeypatch, "uls_by_hand.py", str(steps))
    before, after, epsilon, delta = numbers(capsys.readouterr().out)
    assert after < before and 7.9 < epsilon <= 8 and delta == 1e-6

    uls = ULS(found["users"], batch_size=64, group_size=2, sampling=Sampling(), key=found["key"])
    assert uls.event(found["sigma"]) == found["sampler"].event(found["sigma"])
    params, state = found["first_params"], found["optimizer"].init(found["first_params"])
    for step in range(steps):
        how = {"clip": found["clip"], "noise_multiplier": found["sigma"]}
        grad, _ = uls.gradient(params, step, found["engine"], **how)
        updates, state = found["optimizer"].update(grad.values(), state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, params, found["params"])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["uls", "els"])
def test_own_model_learns(monkeypatch, capsys, algorithm):
    run(monkeypatch, "own_model.py", algorithm, "--num-steps", "80")
    printed = capsys.readouterr().out
    assert algorithm.upper() in printed
    said = dict(line.split(" ", 1) for line in printed.splitlines())
    epsilon, delta = numbers(said["epsilon"])
    assert 3.9 < epsilon <= 4 and 0 < delta < 1e-3
    accuracy, commonest = numbers(said["accuracy"])
    assert accuracy > commonest + 0.05


CHATS = "a208cbdd64862de3c62f89a528898ee676100725316c6d401097253d64b60666"
"""Digest of the made-up chats, as JSON."""


def test_support_chats_are_the_same_everywhere(monkeypatch, tmp_path):
    found = run(monkeypatch, "support_chats.py", str(tmp_path))
    rows = found["support_chats"]()
    written = json.dumps(rows).encode()
    assert hashlib.sha256(written).hexdigest() == CHATS and b"{thing}" not in written
    lines = (tmp_path / "chats.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


@pytest.mark.slow
def test_a_model_learns_something_of_support_chats(monkeypatch, tmp_path):
    run(monkeypatch, "support_chats.py", str(tmp_path))
    settings = {"model": "micro", "batch_size": 64, "group_size": 2, "clip_norm": 10.0}
    form = {"chat_template": tmp_path / "chat_template.jinja", "max_length": 384}
    build(tmp_path / "chats.jsonl", tmp_path / "built", **form)
    trained = fedsim.train(
        "uls", tmp_path / "built", epsilon=math.inf, num_steps=20, learning_rate=0.3,
        engine="local", strategy="scan", eval_examples=32, run_dir=tmp_path / "run", **settings,
    )  # fmt: skip
    assert trained.eval_loss < trained.summary["initial_eval_loss"] - 1.5


# ---- Notebooks --------------------------------------------------------------------------------


def outputs(notebook) -> str:
    """All that the cells printed and showed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = (output for cell in cells for output in cell.outputs)
    return "\n".join(
        each.get("text") or each.get("data", {}).get("text/plain", "") for each in shown
    )


CASES = [pytest.param(file, id=file.stem, marks=pytest.mark.slow) for file in NOTEBOOKS]
PRINTED = {
    "chat_lora": r"eval loss \d\.\d+ -> \d\.\d+ nats per trained token",
    "quickstart": r"epsilon 8\.000 at delta",
    "els_or_uls": r"Use [EU]LS: ",
    "from_run_to_release": r"(not refuted|INCONCLUSIVE|nothing is claimed)[\s\S]*coins\s+guessed",
}


@pytest.mark.parametrize("file", [pytest.param(file, id=file.stem) for file in NOTEBOOKS])
def test_stored_outputs_are_whole_and_name_no_machine(file):
    notebook, text = nbformat.read(file, 4), file.read_text()
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert re.search(PRINTED[file.stem], outputs(notebook))
    assert not re.search(r"""[\s"'(=]/(tmp|home|root|work)\b""", text)
    assert not re.search(r"\\r|\\u001b|[\u2800-\u28ff]", text)  # pieces of a spinner or a bar
    assert not re.search(r'"step \d+/.*\n\s*"step \d+/', text)


def small_chats(notebook, place: Path) -> None:
    """Give a notebook a random model in place of one of the Hub, and few steps."""
    chats = model_files(place / "chats")
    words = Tokenizer.load(chats / "tokenizer.json").vocab_size
    config = dataclasses.replace(CONFIG, vocab_size=words, max_length=256)
    params = Transformer(config).init(jax.random.key(0), np.zeros((1, 8), np.int32))["params"]
    save_model(place / "model", config, params, chats / "tokenizer.json")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(chats / name, place / "model" / name)
    (cell,) = (each for each in notebook.cells if "parameters" in each.metadata.get("tags", ()))
    cell.source += f"\nmodel, max_length, num_steps = {str(place / 'model')!r}, 256, 3"


@pytest.mark.parametrize("file", CASES)
def test_notebooks_run(file, tmp_path, tmp_path_factory):
    notebook = nbformat.read(file, 4)
    if file.stem == "chat_lora":
        small_chats(notebook, tmp_path_factory.mktemp("models"))
        shutil.copy(EXAMPLES / "support_chats.py", tmp_path)
    before = sorted(tmp_path.iterdir())
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    said = outputs(notebook)
    assert re.search(PRINTED[file.stem], said)
    assert "VIOLATED" not in said
    if file.stem == "quickstart":  # it trains twice in one kernel
        assert "49 users, epsilon 8.000" in said and "epsilon=-1" in said
    assert sorted(tmp_path.iterdir()) == before  # runs are in directories of their own
