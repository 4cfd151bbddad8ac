"""The five data sets of ../shared/data have the statistics that are known of them. Minutes each."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from experiments.data import options_of
from fedsim.data.building.build import build
from fedsim.data.dataset import stats
from fedsim.data.tokenizer import Tokenizer

SHARED = Path(__file__).parents[3] / "shared"
TOKENIZER = SHARED / "models" / "smollm2_tokenizer.json"
ALL_IN_TRAIN = {"eval_users": 0, "eval_examples": False}

# users, examples; median, p95, max per user
KNOWN = {
    "scotus": (9_324, 2_245_386, (150, 724, 2_048)),
    "reddit_links": (28_315, 342_503, (3, None, 5_613)),
    "allsides_news": (None, 37_437, (None, None, None)),
    "debian_desc": (2_246, 60_238, (3, 63, 3_969)),
    "shakespeare": (295, 6_913, (7, 103, 359)),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data is not here"),
]


@pytest.mark.parametrize("name", KNOWN)
def test_round_trip(tmp_path, name):
    """Text to tokens and back, in the order of the file, of the first user and of some others."""
    file = SHARED / "data" / f"{name}.parquet"
    table = pq.read_table(file, columns=["user_id", "text"]).slice(0, 40_000)
    pq.write_table(table, tmp_path / "part.parquet")
    options = {"tokenizer": TOKENIZER, "max_length": 4_096, **ALL_IN_TRAIN}
    data = build(tmp_path / "part.parquet", tmp_path / "out", **options)
    tokenizer = Tokenizer.load(data.tokenizer_path)
    users, texts = table["user_id"].to_pylist(), table["text"].to_pylist()
    expected = {}
    for user, text in zip(users, texts, strict=True):
        expected.setdefault(user, []).append(text)
    ids = data.train.user_ids()
    assert ids == sorted(expected)
    for user in range(0, len(ids), max(1, len(ids) // 25)):
        rows = np.arange(*data.train.offsets[user : user + 2])
        tokens, sizes = data.train.gather(rows, 4_096)
        found = [tokenizer.decode(t[:n]) for t, n in zip(tokens, sizes, strict=True)]
        assert found == expected[ids[user]]


def test_the_papers_split_of_cc_news(tmp_path):
    given = {"user_column": "user_id", "min_examples": 8}
    file = SHARED / "data" / "reddit_links.parquet"
    data = build(file, tmp_path / "out", **options_of("cc-news", given))
    train, test = stats(data.train), stats(data.eval_examples)
    assert (train["num_users"], train["num_examples"]) == (5_759, 250_983)
    assert train["examples_per_user"]["median"] == 14
    assert (test["num_examples"], test["examples_per_user"]["median"]) == (22_457, 2)


def test_the_papers_split_of_stack_overflow(tmp_path):
    given = {"user_column": "user_id", "text_column": "text", "order_column": "date"}
    given |= {"test_from": "2000-01-01", "eval_users": 0.0}
    file = SHARED / "data" / "scotus.parquet"
    data = build(file, tmp_path / "out", **options_of("stack-overflow", given))
    assert (data.train.num_users, data.train.num_examples) == (7_780, 1_820_330)
    assert (data.test.num_users, data.test.num_examples) == (1_798, 425_056)
    assert len(set(data.train.user_ids()) & set(data.test.user_ids())) == 254
