"""Begin and end tokens: those that a model's own files name, wherever its tokenizer is taken to."""

import json

import pytest
from learnt import learnt
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from fedsim.data.tokenizer import Tokenizer as Ours
from fedsim.errors import DataError

BOS, EOS, TURN = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜Turn｜>"
SPECIAL = [EOS, BOS, TURN]  # ids 0, 1, 2
LISTED = ["<s>", "</s>"]


def make(directory, special=SPECIAL, template=None, **files):
    """tokenizer.json, and the files beside it, by their names without .json; returns its path."""
    tokens = [*special, "a", "b", "?"]
    vocab = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    if template is not None:
        inner.post_processor = template
    directory.mkdir(exist_ok=True)
    inner.save(str(directory / "tokenizer.json"))
    for name, fields in files.items():
        (directory / f"{name}.json").write_text(json.dumps(fields))
    return directory / "tokenizer.json"


def template(begin, end):
    known = [(token, SPECIAL.index(token)) for token in dict.fromkeys([begin, end])]
    return processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=known)


NAMES = {"bos_token": BOS, "eos_token": EOS}
FOUND = [
    ({"tokenizer_config": NAMES}, (1, 0, {0})),
    ({"tokenizer_config": {"bos_token": {"content": BOS}, "eos_token": {"content": TURN}}}, (1, 2)),
    ({"special_tokens_map": NAMES, "config": {"bos_token_id": 2}}, (1, 0)),
    # a list, and of several that end a text the tokenizer's own is the one that is trained on
    ({"config": {"bos_token_id": 1, "eos_token_id": [0, 2]}}, (1, 0, {0, 2})),
    ({"config": {"bos_token_id": 2, "eos_token_id": [2, 0]}, "tokenizer_config": NAMES}, (1, 0)),
    (
        {"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": [2, 0]}},
        (2, 2, {0, 2}),
    ),
    # names and ids that the vocabulary lacks, and nulls, are passed over
    ({"tokenizer_config": {"bos_token": "<|endoftext|>"}, "config": {"bos_token_id": 1}}, (1, 1)),
    ({"tokenizer_config": {"bos_token": None}, "config": {"bos_token_id": 3}}, (3, 3)),
    ({"config": {"bos_token_id": -1, "eos_token_id": [99, 2]}}, (2, 2, {2})),
    # what config.json says of an older model is wrong where the template is right
    ({"template": template(BOS, EOS), "config": {"bos_token_id": 0, "eos_token_id": 1}}, (1, 0)),
    ({"template": processors.BertProcessing((EOS, 0), (BOS, 1))}, (1, 0, {0})),
    ({"template": processors.Sequence([processors.ByteLevel(), template(TURN, EOS)])}, (2, 0)),
    # nothing names any: the only special token, else names in wide use
    ({"special": [EOS]}, (0, 0, {0})),
    ({"special": LISTED}, (0, 1, {1})),
    ({"special": LISTED, "config": {"bos_token_id": 2, "eos_token_id": 3}}, (2, 3, {3})),
]


@pytest.mark.parametrize("files, expected", FOUND)
def test_tokens_are_those_that_the_files_name(files, expected, tmp_path):
    found = Ours.load(make(tmp_path, **files))
    assert (found.begin_id, found.end_id, set(found.end_ids))[: len(expected)] == expected
    # ... and the file alone, as built data and runs have it, says the same.
    (tmp_path / "alone").mkdir()
    found.save(tmp_path / "alone" / "tokenizer.json")
    again = Ours.load(tmp_path / "alone" / "tokenizer.json")
    assert (again.begin_id, again.end_id) == (found.begin_id, found.end_id)
    assert again.sha256 == found.sha256 and again.encode_batch(["a"]) == found.encode_batch(["a"])


def test_several_special_tokens_that_nothing_names_are_asked_for(tmp_path):
    with pytest.raises(DataError, match="bos_token and eos_token in a tokenizer_config.json"):
        Ours.load(make(tmp_path))


def test_the_hub_is_asked_for_the_files_that_name_them(tmp_path, monkeypatch):
    file = make(tmp_path / "there", config={"bos_token_id": 1, "eos_token_id": 2})
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.extend([name, revision, *allow_patterns])
        return str(file.parent)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = Ours.named("hf:some/model@v1")
    assert (found.begin_id, found.end_id) == (1, 2) and asked[:2] == ["some/model", "v1"]
    assert {"tokenizer_config.json", "generation_config.json", "config.json"} < set(asked)
    file.unlink()
    with pytest.raises(DataError, match="tokenizer=hf:x: expected bytes, hf:NAME of"):
        Ours.named("hf:x")


def test_what_continues_a_text_is_decoded_behind_it(tmp_path):
    """Some tokenizers begin a text in their own way, such as without a blank."""
    texts = ["the pianist was unbelievably good, the others were not"] * 9
    tokenizer = Ours.load(learnt("wordpiece", texts, 300, tmp_path / "t.json"))
    ids = tokenizer.encode_batch(texts[:1])[0]
    for cut in range(len(ids) + 1):
        before, after = tokenizer.decode(ids[:cut]), tokenizer.decode_after(ids[:cut], ids[cut:])
        assert before + after == texts[0]


@pytest.mark.privacy
def test_no_text_has_a_special_token_where_the_vocabulary_has_it_as_a_piece():
    pieces = [("<unk>", 0.0), ("<s>", -1.0), ("</s>", -1.0), ("▁a", -2.0), ("▁", -3.0), ("b", -4.0)]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = Ours(inner, "unigram")
    assert (tokenizer.begin, tokenizer.end) == ("<s>", "</s>")
    spelled, plain, alone = tokenizer.encode_batch(["a </s> b", "a b", "<s>"])
    assert not {tokenizer.begin_id, tokenizer.end_id} & {*spelled, *alone}
    assert plain == tokenizer.encode_batch(["a b"])[0]


REPLACE = {"type": "Replace", "pattern": {"String": ""}, "content": "xx"}
BACK = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
LONG = {"type": "Sequence", "normalizers": [DOUBLE] * 60}
HUGE = {"type": "BPE", "vocab": {"a": 0, "b": 2**31}, "merges": []}
LIMITS = "that takes at most 3 s, or 4,294,967,296 bytes"
HOSTILE = {
    "a panic of Rust": ({"normalizer": REPLACE}, ""),
    "backtracking": ({"pre_tokenizer": BACK}, ""),
    "gigabytes of text": ({"normalizer": LONG}, LIMITS),
    "gigabytes of ids": ({"model": HUGE}, LIMITS),
    "no tokens": ({"added_tokens": {}}, ""),
}


@pytest.mark.parametrize("change, reason", HOSTILE.values(), ids=HOSTILE)
def test_a_tokenizer_of_a_stranger_is_refused_in_one_line(change, reason, tmp_path, monkeypatch):
    """Some of these end the process that loads them, or never end themselves."""
    monkeypatch.setattr("fedsim.data.limited.LOAD_S", 3.0)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(Ours.bytes().json), "truncation": None, **change}))
    expected = f"tokenizer=.*expected a tokenizer.json {reason}"
    with pytest.raises(DataError, match=expected) as raised:
        Ours.load(file)
    assert "\n" not in str(raised.value)


def test_a_tokenizer_that_draws_its_tokens_is_refused(tmp_path):
    record = json.loads(Ours.bytes().json)
    record["model"]["dropout"] = 0.1
    (tmp_path / "x.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="dropout=0.1: expected one without dropout"):
        Ours.load(tmp_path / "x.json")
