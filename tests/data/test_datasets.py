"""Data sets of ../shared/data are split as the paper splits its own. Minutes each."""

from pathlib import Path

import pytest

from experiments.data import options_of
from fedsim.data.building.build import build
from fedsim.data.dataset import stats

SHARED = Path(__file__).parents[3] / "shared"
TOKENIZER = SHARED / "models" / "smollm2_tokenizer.json"
ALL_IN_TRAIN = {"eval_users": 0, "eval_examples": False}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data is not here"),
]


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
