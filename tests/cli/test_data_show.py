"""Chats through the commands and the library: built, shown as a model gets them, trained on."""

import json

import pytest
from chats import START, STOP, model_files

from fedsim.cli import main
from fedsim.data import build

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


def test_counts_that_are_not_zero_are_a_line_each(built, capsys):
    main.main(["data", "stats", str(built)])
    assert capsys.readouterr().out.endswith("\n\nrows             60\ntokens of texts  2,100\n")


def test_all_tokens_of_texts_but_the_first_are_trained_on(tmp_path, capsys):
    file, out = tmp_path / "texts.jsonl", tmp_path / "texts"
    rows = [{"user_id": [f"u{i}", "ben"], "text": "Hi"} for i in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(file, out, eval_users=0)
    with pytest.raises(SystemExit):
        main.main(["data", "show", f"{out}z"])
    assert f"of `fedsim data build`, such as {out}, or" in capsys.readouterr().err
    main.main(["data", "show", str(out), "--rows", "1"])
    line, shown = "row 0 of ben, u0: 4 tokens, 3 trained on (75%)", "<|endoftext|>⟦Hi<|endoftext|>⟧"
    assert capsys.readouterr().out == f"{line}\n{shown}\n\n"
