"""Sources by name: directories, cached files, and the embedded corpus."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from learnt import learnt

from fedsim.data import tokenizer_is_public
from fedsim.data.building.build import build
from fedsim.data.corpora import load
from fedsim.data.tokenizer import Tokenizer
from fedsim.errors import DataError


@pytest.fixture
def source(tmp_path):
    users, texts = [f"u{i % 40}" for i in range(200)], [f"text {i}" for i in range(200)]
    pq.write_table(pa.table({"user_id": users, "text": texts}), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def entries(cache):
    return sorted(path.name for path in (cache / "data").iterdir())


def test_pydocs_has_users_of_many_sizes():
    data = load("pydocs")
    sizes = np.diff(data.train.offsets)
    assert data.train.num_users > 500 and data.train.num_examples > 20_000
    assert sizes.min() == 1 and 5 <= np.median(sizes) <= 30 and sizes.max() > 500
    assert data.eval_users.num_users > 20 and data.eval_examples.num_examples > 1_000


def test_what_changes_the_result_is_built_anew_and_all_else_once(source, tmp_path):
    file, cache = tmp_path / "tokenizer.json", tmp_path / "cache"
    Tokenizer.bytes().save(file)
    for number, options in enumerate([{}, {"max_length": 32}, {"tokenizer": file}], 1):
        first = load(str(source), cache_dir=cache, **options)
        assert load(source, cache_dir=cache, progress=print, **options).path == first.path
        assert len(entries(cache)) == number
    learnt("bpe", ["some other words"], 300, file)
    assert load(source, cache_dir=cache, tokenizer=file).train.vocab_size != 257
    os.utime(source, ns=(1, 1))
    load(source, cache_dir=cache)
    assert len(entries(cache)) == 5


@pytest.mark.privacy
@pytest.mark.parametrize("first", [True, False])
def test_a_tokenizer_of_a_model_is_another_build_than_a_copy_of_it(source, tmp_path, first):
    """The data note it, and `--strict` refuses the file."""
    for place, of_model in (("a", first), ("b", not first)):
        (tmp_path / place).mkdir()
        learnt("bpe", ["some words"], 300, tmp_path / place / "tokenizer.json")
        if of_model:
            (tmp_path / place / "config.json").write_text('{"model_type": "llama"}')
        data = load(source, cache_dir=tmp_path / "cache", tokenizer=tmp_path / place)
        assert tokenizer_is_public(data.metadata) == of_model


def test_a_built_directory_is_opened(source, tmp_path):
    built = build([source], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert load(tmp_path / "out").train.fingerprint == built.train.fingerprint
    (tmp_path / "out" / "notes.csv").write_text("a,b\n1,2\n")  # somebody's, and no text
    assert load(tmp_path / "out").train.fingerprint == built.train.fingerprint
    there = "expected .* that exists"
    said = {"empty": "expected files in it", "outs": f"{there}, such as .*/out$", "no": f"{there}$"}
    for name, expected in said.items():
        with pytest.raises(DataError, match=f"^data=.*/{name}: {expected}"):
            load(tmp_path / name)
    with pytest.raises(
        DataError, match="^max_length=9: expected no such setting for .*/out, which"
    ):
        load(tmp_path / "out", max_length=9)
