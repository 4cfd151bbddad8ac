"""Sources by name: directories, cached files, and the embedded corpus."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from learnt import learnt
from local_hub import bytes_with, publish

from fedsim.data import corpora, tokenizer_is_public
from fedsim.data.building.build import build
from fedsim.data.corpora import load
from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import DataError
from fedsim.files import cache_dir


@pytest.fixture(scope="module")
def corpus():
    """pydocs, built once for all tests; (cache directory, data set)."""
    return cache_dir(), load("pydocs")


@pytest.fixture
def source(tmp_path):
    rows = {
        "user_id": [f"u{i % 40}" for i in range(200)],
        "text": [f"text {i}" for i in range(200)],
    }
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def entries(cache):
    return sorted(path.name for path in (cache / "data").iterdir())


def test_pydocs_has_users_of_many_sizes(corpus):
    data = corpus[1]
    sizes = np.diff(data.train.offsets)
    assert data.train.num_users > 500 and data.train.num_examples > 20_000
    assert sizes.min() == 1 and 5 <= np.median(sizes) <= 30 and sizes.max() > 500
    assert data.eval_users.num_users > 20 and data.eval_examples.num_examples > 1_000


def test_pydocs_texts_are_paragraphs_of_docstrings(corpus):
    store = corpus[1].train
    user = store.user_ids().index("numpy/linalg/_linalg.py")
    tokens, sizes = store.gather(np.arange(*store.offsets[user : user + 2]), 128)
    texts = [Tokenizer.bytes().decode(t[:n]) for t, n in zip(tokens, sizes, strict=True)]
    assert any("matrix" in text for text in texts)
    assert all(text.strip() and "\n\n" not in text for text in texts)


def test_pydocs_is_found_in_the_cache(corpus, monkeypatch):
    cache, data = corpus
    monkeypatch.setattr(corpora, "build", None)  # neither built again ...
    monkeypatch.setattr(corpora, "harvest_pydocs", None)  # ... nor read again
    again = load("pydocs", cache_dir=cache)
    assert again.path == data.path and again.train.fingerprint == data.train.fingerprint


def test_paragraphs_of_a_module(tmp_path):
    (tmp_path / "m.py").write_text(
        '"""First paragraph has five words.\n\nToo short.\n"""\n'
        "if True:\n    class A:\n        '''Inside a branch and class.'''\n"
        "        def f(self):\n            '''One two three four five.\n\n"
        "            Six seven eight nine ten.\n            '''\n"
        "x = '''no docstring but five words'''\n"
    )
    assert list(corpora._paragraphs(tmp_path / "m.py")) == [
        "First paragraph has five words.",
        "Inside a branch and class.",
        "One two three four five.",
        "Six seven eight nine ten.",
    ]
    (tmp_path / "bad.py").write_text("def (:")
    assert list(corpora._paragraphs(tmp_path / "bad.py")) == []


def test_files_are_built_once(source, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = load(str(source), cache_dir=cache, max_length=32)
    monkeypatch.setattr(corpora, "build", None)
    again = load(source, cache_dir=cache, max_length=32, progress=print)
    assert again.path == first.path and len(entries(cache)) == 1


def test_what_changes_the_result_is_built_anew(source, tmp_path):
    cache = tmp_path / "cache"
    load(source, cache_dir=cache)
    load(source, cache_dir=cache, max_length=32)
    assert len(entries(cache)) == 2
    os.utime(source, ns=(1, 1))
    load(source, cache_dir=cache)
    assert len(entries(cache)) == 3


def test_a_changed_tokenizer_file_is_another_build(source, tmp_path):
    file, cache = tmp_path / "tokenizer.json", tmp_path / "cache"
    Tokenizer.bytes().save(file)
    load(source, cache_dir=cache, tokenizer=file)
    learnt("bpe", ["some other words"], 300, file)
    assert load(source, cache_dir=cache, tokenizer=file).train.vocab_size != 257
    assert len(entries(cache)) == 2


@pytest.mark.privacy
@pytest.mark.parametrize("first", [True, False])
def test_a_tokenizer_of_a_model_is_another_build_than_the_same_file_elsewhere(
    source, tmp_path, first
):
    """The data note it, and `--strict` refuses the file."""
    for place, of_model in (("a", first), ("b", not first)):
        (tmp_path / place).mkdir()
        learnt("bpe", ["some words"], 300, tmp_path / place / "tokenizer.json")
        if of_model:
            (tmp_path / place / "config.json").write_text('{"model_type": "llama"}')
        data = load(source, cache_dir=tmp_path / "cache", tokenizer=tmp_path / place)
        assert tokenizer_is_public(data.metadata) == of_model


def test_another_tokenizer_of_the_hub_is_another_build(source, tmp_path, monkeypatch):
    for characters in ("ab", "xt"):
        publish("org/name", bytes_with(*characters), tmp_path / "hub", monkeypatch)
        for _ in range(2):
            data = load(source, cache_dir=tmp_path / "cache", tokenizer="hf:org/name")
            assert data.metadata["tokenizer"]["sha256"] == Tokenizer.named("hf:org/name").sha256
    assert len(entries(tmp_path / "cache")) == 2


def test_a_chat_template_is_nothing_to_data_of_texts(source, tmp_path):
    cache, model = tmp_path / "cache", tmp_path / "model"
    model.mkdir()
    Tokenizer.bytes().save(model / "tokenizer.json")
    first = load(source, cache_dir=cache, tokenizer=model)
    (model / "chat_template.jinja").write_text("{% unknown %}")
    again = load(source, cache_dir=cache, tokenizer=model)
    assert again.train.fingerprint == first.train.fingerprint


def test_builds_at_the_same_time_agree(source, tmp_path):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load(source, cache_dir=tmp_path / "c"), range(4)))
    assert len({data.path for data in found}) == 1
    assert len({data.train.fingerprint for data in found}) == 1
    assert len(entries(tmp_path / "c")) == 1  # and no staging directory


def test_a_built_directory_is_opened(source, tmp_path):
    built = build([source], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert load(tmp_path / "out").train.fingerprint == built.train.fingerprint
    (tmp_path / "out" / "notes.csv").write_text("a,b\n1,2\n")  # somebody's, and no text
    assert load(tmp_path / "out").train.fingerprint == built.train.fingerprint
    with pytest.raises(DataError, match="data=.*empty: expected"):
        load(tmp_path / "empty")


def test_a_failed_build_leaves_no_entry(source, tmp_path):
    with pytest.raises(DataError, match="no such column"):
        load(source, cache_dir=tmp_path / "c", text_column="body")
    assert not (tmp_path / "c").exists() or entries(tmp_path / "c") == []


@pytest.mark.parametrize(
    "name, message",
    [
        ("hf:", "expected hf:NAME"),
        ("nowhere", "file or glob that exists"),
        ("", "data=: expected a file or glob"),
    ],
)
def test_unknown_sources(name, message):
    with pytest.raises(DataError, match=message):
        load(name)
