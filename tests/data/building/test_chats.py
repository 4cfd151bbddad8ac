"""Rows of chats become examples with their trained tokens, whatever form and file they come in."""

import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
from chats import CHATML, START, STOP, model_files

from fedsim.cli.main import main
from fedsim.config import BuildConfig
from fedsim.data import load
from fedsim.data.building.build import build
from fedsim.data.building.messages import Chats, chat_examples, messages_of
from fedsim.data.chat import ChatTokenizer, Template
from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import ConfigError, DataError

ALL_IN_TRAIN = {"eval_users": 0, "eval_examples": False, "max_length": 200}
ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
SAID = f"{START}user\nHi{STOP}\n{START}assistant\nHo{STOP}\n"


def lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def shown(store, model):
    """(user, text, trained text) of every example."""
    tokenizer = Tokenizer.load(model / "tokenizer.json")
    rows = np.arange(store.num_examples)
    tokens, sizes = store.gather(rows, store.max_length)
    trained = store.trained(rows, store.max_length)
    users = np.repeat(store.user_ids(), store.examples_per_user)
    return [
        (str(user), *(tokenizer.decode(ids, special=True) for ids in (row[:size], row[own])))
        for user, row, size, own in zip(users, tokens, sizes, trained, strict=True)
    ]


@pytest.fixture
def model(tmp_path):
    return model_files(tmp_path / "model")


def built(tmp_path, model, rows, name="rows.jsonl", **options):
    file = lines(tmp_path / name, [{"user_id": "ann", **row} for row in rows])
    return build(file, tmp_path / "out", tokenizer=model, **ALL_IN_TRAIN | options)


def test_data_of_texts_have_no_mark_of_chats(tmp_path, model):
    data = built(tmp_path, model, [{"text": "Hi", "messages": ASKED}])  # texts, as ever
    assert data.train.trained(np.array([0]), 4) is None
    assert not list(data.path.glob("**/trained.npy")) and "chats" not in data.metadata
    assert not any("chat" in name for name in data.metadata["counts"])


@pytest.mark.privacy
@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": False}, {"masked": 1}])
def test_a_turn_that_is_marked_is_not_trained_on(mark):
    other = {"role": "assistant", "content": "Ho"}
    found = messages_of([ASKED[0], {**ASKED[1], **mark}, ASKED[0], other])
    assert [each.counts for each in found] == [True, False, True, True]
    (name, value), *_ = mark.items()
    (unmarked,) = messages_of([{**ASKED[1], name: not value}])
    assert unmarked.counts


ENDLESS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NO_TOOLS = "does not write the column tools, so the model does not see which tools there are; "
NO_TOOLS += "the template chatml-tools writes them"
TOLD = [(ENDLESS, {}, ["writes no special token after an answer"]), (CHATML, {}, [])]
TOLD += [(CHATML, {"tools": [{"name": "find"}]}, [NO_TOOLS])]


@pytest.mark.parametrize("template, beside, told", TOLD)
def test_what_a_template_does_not_write_is_told(template, beside, told, tmp_path):
    said, model = [], model_files(tmp_path / "model", template)
    built(tmp_path, model, [{"messages": ASKED, **beside}], progress=said.append)
    notes = [line.partition("template ")[2] for line in said if "chat" in line]
    assert [note.partition(", so that")[0] for note in notes] == told


def test_a_row_that_takes_too_long_is_never_skipped(monkeypatch):
    monkeypatch.setattr("fedsim.data.limited.RENDER_S", -1.0)
    chats = Chats("messages", "all", NUMBERED, BuildConfig(max_length=20, skip_unknown=True))
    *_, bad = chat_examples([json.dumps([ASKED])] * 2, chats, CHATS)
    assert bad == {0: ("its template takes more than -1 s, or 4,294,967,296 bytes of memory", "")}


def test_rows_without_a_trained_token_are_dropped_and_counted(tmp_path, model):
    long = [{"role": "user", "content": "x" * 300}, ASKED[1]]
    rows = [{"messages": each} for each in (ASKED, ASKED[:1], long)]
    data = built(tmp_path, model, rows)
    assert data.train.num_examples == 1
    counts = data.metadata["counts"]
    assert (counts["chats_without_trained_tokens_dropped"], counts["chats_skipped"]) == (2, 0)
    assert counts["long_texts"] == 1 and counts["tokens_cut"] > 100
    cut, untrained = data.lost()
    assert "33% of texts are longer than 200 tokens. Of all" in cut and "split" not in cut
    assert "2 of 3 rows (66.7%) are left out: nothing in them is trained on, or" in untrained
    file = lines(tmp_path / "none.jsonl", [{"user_id": "a", "messages": ASKED[:1]}])
    with pytest.raises(DataError, match="no row has a trained token .train_on=assistant"):
        build(file, tmp_path / "none", tokenizer=model)


LONG = [{"text": "x" * number} for number in (5, 50, 120, 300)]
ASKING = [{"messages": [{"role": "user", "content": x["text"]}, ASKED[1]]} for x in LONG]
KEPT = "75% of texts are longer than 30 tokens. Of all tokens, max_length 30 keeps 19%, 32 keeps "
KEPT += "21%, 64 keeps 38%, 128 keeps 64%, 256 keeps 91%; long_texts=split keeps all"


@pytest.mark.parametrize("rows, how", [(LONG, "cut"), (ASKING, "cut"), (ASKING, "split")])
def test_a_build_says_how_many_tokens_a_larger_max_length_keeps(rows, how, tmp_path, model):
    data = built(tmp_path, model, rows, max_length=30, long_texts=how)
    assert data.lost() == [KEPT] if rows is LONG else "256 keeps " in data.lost()[0]
    for most, kept in data.metadata["tokens_kept"]:  # as builds with these say
        shutil.rmtree(tmp_path / "out")
        counts = built(tmp_path, model, rows, max_length=most, long_texts=how).metadata["counts"]
        assert kept == counts["tokens_of_texts"] - counts["tokens_cut"]


def test_a_new_model_for_the_tokens_of_a_pretrained_one_is_asked_for(tmp_path, model, capsys):
    (model / "config.json").write_text('{"model_type": "llama"}')
    data = tmp_path / "data"
    texts = lines(tmp_path / "x.jsonl", [{"user_id": f"u{n}", "text": "of red"} for n in range(40)])
    flags = f"--data {data} --epsilon 8 --num-steps 2 --batch-size 4 --group-size 1 --dry-run"
    cases = [(model, 0, [], 1), (model, 0, ["--model", "tiny"], 0), (model, 1, [], 0)]
    for tokenizer, declared, given, refused in [*cases, ("bytes", 0, [], 0)]:
        build(texts, data, tokenizer=tokenizer, tokenizer_is_public=bool(declared))
        with pytest.raises(SystemExit) if refused else nullcontext():
            main(["train", "uls", *flags.split(), "--run-dir", str(tmp_path / "run"), *given])
        assert ("model: missing, expected the directory" in capsys.readouterr().err) == refused
        shutil.rmtree(data)


TOGETHER = [
    ({"messages_column": "m", "text_column": "t"}, "messages_column=m"),
    ({"messages_column": "m", "prompt_column": "p"}, "messages_column=m"),
    ({"prompt_column": "p"}, "completion_column=None"),
    ({"completion_column": "c"}, "prompt_column=None"),
    ({"train_on": "me"}, "train_on=me"),
    ({"messages_column": "turns"}, "messages_column=turns"),
    ({"tokenizer": "bytes"}, "tokenizer=bytes"),
    ({"chat_template": "nowhere"}, "chat_template=nowhere"),
]


@pytest.mark.parametrize("options, what", TOGETHER)
def test_what_does_not_go_together_is_refused(options, what, tmp_path, model):
    file = lines(tmp_path / "x.jsonl", [{"user_id": "ann", "messages": ASKED}])
    with pytest.raises(ConfigError, match=f"^{what}: "):
        build(file, tmp_path / "out", **{"tokenizer": model, **ALL_IN_TRAIN, **options})


def test_another_template_is_another_data_set(tmp_path, model):
    file = lines(tmp_path / "x.jsonl", [{"user_id": "ann", "messages": ASKED}])
    options = {"tokenizer": str(model), "cache_dir": tmp_path / "cache", **ALL_IN_TRAIN}
    first = load(file, **options)
    assert load(file, **options).path == first.path
    (model / "chat_template.jinja").write_text(CHATML.replace("m['role']", "'a'"))
    second = load(file, **options)
    assert second.path != first.path and "a\nHi" in shown(second.train, model)[0][1]
    (tmp_path / "own.jinja").write_text(CHATML)
    third = load(file, chat_template=tmp_path / "own.jinja", **options)
    assert third.train.fingerprint == first.train.fingerprint


NUMBERED = Template("{% for m in messages %}{{ m.role[0] + m.content + '.' }}{% endfor %}")
CHATS = ChatTokenizer(Tokenizer.bytes(), NUMBERED)


@pytest.mark.parametrize("turns, expected", [(1, "end"), (3, "beginning")])
def test_a_long_chat_is_its_end_if_what_is_trained_on_is_there(turns, expected, tmp_path, model):
    messages = [{"role": "user", "content": "x" * 300}, ASKED[1]] * turns
    rows = [{"messages": messages}, {"messages": ASKED}]
    data = built(tmp_path, model, rows, long_texts="split", max_length=60)
    texts = [(text, own) for _, text, own in shown(data.train, model)]
    assert texts[-1] == (SAID, f"Ho{STOP}\n") and len(texts) == (2 if turns == 1 else 1)
    if expected == "end":
        assert texts[0][0].endswith(f"xx{STOP}\n{START}assistant\nHo{STOP}\n")
    assert data.metadata["counts"]["long_texts"] == 1
