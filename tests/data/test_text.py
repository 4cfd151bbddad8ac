"""Tokenizers: round trips, framing, and that a special token in a text is only text."""

import json

import pytest
from learnt import learnt
from tokenizers import Tokenizer as Library

from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import DataError

TEXTS = ["Hello, world", "naïve café 日本 😀", " \n\ttabs ", "<|endoftext|> [SEP] \x00", ""]
WORDS = ["the cat sat on the mat, the cat ran", "a mat is not a cat 日 é"] * 5


def test_bytes_are_bytes_and_survive_a_round_trip():
    tokenizer = Tokenizer.bytes()
    assert (tokenizer.vocab_size, tokenizer.begin_id, tokenizer.end_id) == (257, 256, 256)
    assert tokenizer.name == "bytes" and tokenizer.is_given
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids == list(text.encode())
        assert tokenizer.decode([256, *ids, 256]) == text


def test_a_saved_tokenizer_is_the_same_and_bytes_are_what_the_library_gives(tmp_path):
    saved = tmp_path / "tokenizer.json"
    file = learnt("wordpiece", WORDS, 300, tmp_path / "learnt.json")
    for tokenizer in (Tokenizer.load(file), Tokenizer.bytes()):
        tokenizer.save(saved)
        again, expected = Tokenizer.load(saved), tokenizer.encode_batch(TEXTS)
        assert again.sha256 == tokenizer.sha256 and again.encode_batch(TEXTS) == expected
    library = Library.from_file(str(saved))
    library.encode_special_tokens = True
    assert [e.ids for e in library.encode_batch(TEXTS, add_special_tokens=False)] == expected
    library.enable_truncation(2)  # which a file may ask for, as for padding
    library.enable_padding(length=9)
    library.save(str(saved))
    assert Tokenizer.load(saved).encode_batch(TEXTS) == expected


def test_a_tokenizer_without_begin_or_end_is_refused(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(DataError, match="expected a begin or end token"):
        Tokenizer.load(tmp_path / "t.json")


@pytest.mark.privacy
def test_a_file_is_public_if_it_is_bytes_or_a_models(tmp_path):
    file = learnt("bpe", WORDS, 300, tmp_path / "tokenizer.json")
    assert not Tokenizer.load(file).is_given
    (tmp_path / "config.json").write_text('{"plan": {}}')  # of a run
    assert not Tokenizer.load(file).is_given
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert Tokenizer.load(file).is_given
    Tokenizer.bytes().save(tmp_path / "other.json")
    assert Tokenizer.load(tmp_path / "other.json").is_given
