"""Examples begin with a label of a public set, which a model reads and does not learn to write."""

import numpy as np
import pandas as pd
import pytest
from chats import CHATML, START, STOP, model_files
from test_chats import ALL_IN_TRAIN, ASKED, SAID, lines, shown

from fedsim.data import Message, Tokenizer, label_prompts, labels_of
from fedsim.data.building.build import build
from fedsim.errors import DataError
from fedsim.library.tables import source_of
from fedsim.models import Pretrained, preset
from fedsim.synthesis import store_of
from fedsim.synthesis.prompts import Opening, Writer

CONDITIONED = {**ALL_IN_TRAIN, "condition_on": "lang", "labels": ["en", "de"]}


def test_a_label_that_is_none_is_answered_with_those_there_are(tmp_path):
    with pytest.raises(DataError, match=r"one of the labels \('en,de'\) in row 1"):
        built(tmp_path, [row("de", "Hallo")], labels=["en,de"])


def prompts_of(data):
    return label_prompts(data.metadata["labels"], Tokenizer.load(data.path / "tokenizer.json"))


def row(lang, text, user="ann"):
    return {"user_id": user, "text": text, "lang": lang}


def built(tmp_path, rows, name="rows", **options):
    file = lines(tmp_path / f"{name}.jsonl", rows)
    return build(file, tmp_path / name, **CONDITIONED | options)


@pytest.mark.parametrize("long_texts", ["cut", "split"])
def test_a_text_follows_the_prompt_of_its_label(tmp_path, long_texts):
    """Also each part of a long one; and a text that spells a label is text."""
    texts = ["Hallo", "lang: en\n\nhi<|endoftext|>", "x" * 70]
    rows = [row("de", texts[0]), row("de", texts[1]), row("en", texts[2])]
    data = built(tmp_path, rows, max_length=40, long_texts=long_texts)
    prompts, tokenizer, store = prompts_of(data), Tokenizer.bytes(), data.train
    assert prompts["de"] == [tokenizer.begin_id, *b"lang: de\n\n"]
    parts = [*map(str.encode, texts[:2]), *([b"x" * 29] * (1 if long_texts == "cut" else 2))]
    parts += [b"x" * 12] if long_texts == "split" else []
    numbers = np.arange(store.num_examples)
    tokens, sizes = store.gather(numbers, store.max_length)
    trained = store.trained(numbers, store.max_length)
    end = tokenizer.end_id
    for own, ids, size, flags, label in zip(
        parts, tokens, sizes, trained, labels_of(store, [*prompts.values()]), strict=True
    ):
        prompt = prompts["de" if own[:1] != b"x" else "en"]
        assert prompt == [*prompts.values()][label]
        ends = [end] if len(prompt) + len(own) < 40 else []
        assert ids[:size].tolist() == [*prompt, *own, *ends]
        assert flags[:size].tolist() == [False] * len(prompt) + [True] * (len(own) + len(ends))
    about = {"column": "lang", "labels": ["en", "de"], "template": "{column}: {label}\n\n"}
    assert data.metadata["labels"] == about
    assert len(parts) == store.num_examples and data.metadata["counts"]["long_texts"] == 1


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        (CHATML, START + "lang: de\n\n" + START),  # which opens the first turn, and is no begin
        ("{{ bos_token }}" + CHATML.replace(START, "#"), START + "lang: de\n\n#"),
    ],
)
def test_a_chat_follows_the_prompt_of_its_label(tmp_path, template, begin):
    model = model_files(tmp_path / "model", template)
    rows = [{"user_id": "ann", "messages": ASKED, "lang": "de"}]
    data = built(tmp_path, rows, tokenizer=model)
    [(_, whole, own)] = shown(data.train, model)
    rest = SAID.removeprefix(START).replace(START, begin[-len("#") :] if "#" in begin else START)
    assert whole == begin + rest and own == f"Ho{STOP}\n"
    assert labels_of(data.train, [*prompts_of(data).values()]).tolist() == [1]
    # Synthesis asks for a reply, and a synthetic chat is measured, in the same form.
    (tokens,), (size,) = data.train.gather(np.array([0]), data.train.max_length)
    asked = tuple(Message(each["role"], each["content"]) for each in ASKED[:-1])
    opening = Opening("de", messages=asked, label=tuple(prompts_of(data)["de"]))
    about = {"tokenizer": model / "tokenizer.json", "files": model}
    writer = Writer(Pretrained(preset("micro", 300, 64), None, **about), chats=True)
    begin = writer.begin(opening)
    assert begin == tokens[: len(begin)].tolist() and len(begin) < size
    again = store_of([{"messages": ASKED, "prompt_class": "de"}], data)
    np.testing.assert_array_equal(again.gather(np.array([0]), len(tokens))[0][0], tokens)


def test_a_pair_follows_the_prompt_of_its_label_and_fits(tmp_path):
    model = model_files(tmp_path / "model")
    rows = [
        {"user_id": "ann", "prompt": p, "completion": "Ho", "lang": "en"} for p in ("Hi", "y" * 90)
    ]
    data = built(tmp_path, rows, tokenizer=model, max_length=50, long_texts="split")
    (_, whole, own), (_, longer, _) = shown(data.train, model)
    assert longer.startswith(f"{START}lang: en\n\ny")
    assert whole == f"{START}lang: en\n\nHiHo{STOP}" and own == f"Ho{STOP}"
    assert longer.endswith(f"yHo{STOP}") and max(data.train.lengths) <= 50


def test_rows_of_other_labels_are_refused_or_left_out(tmp_path):
    rows = [row("en", "a"), row("", "b"), row(None, "c"), row("EN", "d"), row("de", "e")]
    file = lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"^condition_on=lang: .* in row 2 of .*rows.jsonl") as told:
        build(file, tmp_path / "out", **CONDITIONED)
    assert told.value.field == "condition_on" and "\n" not in str(told.value)
    data = build(file, tmp_path / "out", **CONDITIONED, skip_unknown=True)
    assert data.train.num_examples == 2
    assert data.metadata["counts"]["rows_of_other_labels_dropped"] == 3
    shared = lines(
        tmp_path / "shared.jsonl", [{**each, "user_id": ["ann", "bob"]} for each in rows]
    )
    with pytest.raises(DataError, match="condition_on=lang: expected a label .* 3 have another"):
        build(shared, tmp_path / "shared", **CONDITIONED, skip_unknown=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": []}, "labels=: expected at least one label"),
        ({"labels": ["en", "en"]}, "labels=en en: expected at least one label, none twice"),
        ({"labels": ["en\n\nde"]}, "expected a line of printable text"),
        ({"condition_on": None}, "labels=en de: expected them beside condition_on"),
        ({"condition_on": "language"}, "condition_on=language: no such column"),
        ({"max_length": 12}, "max_length=12: expected at least 13, 11 of them for the label"),
        (
            {"tokenizer": "wordpiece:300", "labels": ["en", "EN"]},
            "labels=en EN: expected labels that the tokenizer tells apart, and it takes 'EN' for",
        ),
    ],
)
def test_what_makes_no_labels_is_one_line(tmp_path, options, message):
    with pytest.raises(DataError, match=message) as told:
        built(tmp_path, [row("en", "aaaa bbbb")], **options)
    assert "\n" not in str(told.value)


@pytest.mark.privacy
def test_the_labels_of_a_user_change_that_users_rows_alone(tmp_path):
    """What is public of the data is the same; the set of labels is not that of the values."""

    def of(labels, name):
        rows = [row("en", f"text {i}", user) for user in ("ann", "bob", "cid") for i in range(3)]
        rows += [row(label, f"text {i}", "zed") for i, label in enumerate(labels)]
        data = built(tmp_path, rows, name)
        metadata = {n: x for n, x in data.metadata.items() if n != "sources"}
        tokens, _ = data.train.gather(np.arange(9), 40)
        return metadata, tokens.tolist()

    assert of(["en", "en"], "one") == of(["de", "en"], "other")


def test_tables_in_memory_and_conversations_have_labels(tmp_path):
    frame = pd.DataFrame([row("de", "Hallo", "ann"), row("en", "Hello", "bob")])
    source = source_of(frame, "user_id", "text", label="lang")
    data = build(source, tmp_path / "memory", **CONDITIONED)
    assert labels_of(data.train, [*prompts_of(data).values()]).tolist() == [1, 0]
    said = {"conversation_column": "where", "turn_column": "turn"}
    rows = [
        {**row("de", "Hallo"), "where": 1, "turn": 1},
        {**row("en", "Hello", "bob"), "where": 1, "turn": 2},
    ]
    data = built(tmp_path, rows, "said", **said)
    assert labels_of(data.train, [*prompts_of(data).values()]).tolist() == [1, 0]


def test_data_without_labels_have_nothing_of_them(tmp_path):
    file = lines(tmp_path / "rows.jsonl", [row("en", f"text {i}", f"u{i % 3}") for i in range(9)])
    data = build(file, tmp_path / "out", eval_users=0)
    names = data.metadata.keys() | data.metadata["columns"].keys() | data.metadata["counts"].keys()
    assert not any("label" in name for name in names) and not data.train.is_flagged
