"""Chats through the commands and the library: built, shown as a model gets them, trained on."""

import json

import numpy as np
import pandas as pd
import pytest
from chats import START, STOP, model_files

import fedsim
from fedsim.cli import main
from fedsim.data import UserStore, build, load
from fedsim.library.tables import source_of

ASKED = [{"role": "user", "content": "Hi\x1b[31m"}, {"role": "assistant", "content": "Ho 😀"}]
ROWS = [{"customer": f"c{i % 20:02}", "turns": ASKED} for i in range(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_files(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def built(model, tmp_path_factory):
    home = tmp_path_factory.mktemp("chats")
    (home / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = ["data", "build", home / "chats.jsonl", "--user-column", "customer"]
    command += ["--messages-column", "turns", "--tokenizer", model, "--out", home / "built"]
    main.main([str(word) for word in command])
    return home / "built"


def test_examples_are_shown_as_the_model_gets_them(built, capsys):
    main.main(["data", "show", str(built), "--rows", "2"])
    out = capsys.readouterr().out
    assert out.startswith("row 0 of c00: ") and " trained on (" in out
    shown = f"{START}user\nHi\\x1b[31m{STOP}\n{START}assistant\n⟦Ho 😀{STOP}\n⟧\n\n"
    assert out.count(shown) == 2  # nobody's text controls the terminal
    main.main(["data", "show", str(built), "--rows", "1", "--split", "eval_examples", "--json"])
    (example,) = json.loads(capsys.readouterr().out)["examples"]
    assert [part["trained"] for part in example["parts"]] == [False, True]
    assert example["parts"][1]["text"] == f"Ho 😀{STOP}\n"
    assert example["tokens"] > example["trained_tokens"] == len("Ho 😀\n".encode()) + 1


def test_all_tokens_of_texts_but_the_first_are_trained_on(tmp_path, capsys):
    file = tmp_path / "texts.jsonl"
    rows = [{"user_id": [f"u{i}", "ben"], "text": "Hi"} for i in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(file, tmp_path / "texts", eval_users=0)
    capsys.readouterr()
    main.main(["data", "show", str(tmp_path / "texts"), "--rows", "1"])
    out = capsys.readouterr().out
    assert (
        out == "row 0 of ben, u0: 4 tokens, 3 trained on (75%)\n<|endoftext|>⟦Hi<|endoftext|>⟧\n\n"
    )


def test_chats_in_memory_are_those_of_the_file(built, model, tmp_path):
    columns = {"user_column": "customer", "messages_column": "turns"}
    source = source_of(pd.DataFrame(ROWS), **columns)
    data = load(source, tokenizer=str(model), cache_dir=tmp_path, **columns)
    assert data.train.fingerprint == UserStore(built / "train").fingerprint


@pytest.mark.slow
@pytest.mark.ci
def test_a_training_on_chats_learns_what_the_assistant_says(model, tmp_path):
    run = fedsim.train(
        "uls",
        pd.DataFrame(ROWS),
        user="customer",
        messages="turns",
        tokenizer=str(model),
        model="micro",
        epsilon=float("inf"),
        num_steps=12,
        batch_size=16,
        group_size=2,
        clip_norm=10.0,
        learning_rate=0.3,
        engine="local",
        seed=1,
        run_dir=tmp_path / "run",
    )
    assert run.eval_loss < run.summary["initial_eval_loss"] - 1
    data = load(run.stored.run.data.source, tokenizer=str(model), user_column="customer",
                messages_column="turns")  # fmt: skip
    assert np.asarray(data.train.trained(np.arange(2), 128)).any()
