"""Examples of texts: begin and end tokens, cutting and splitting."""

from collections import Counter
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from fedsim.config import BuildConfig
from fedsim.data.building.tokenised import frame

BEGIN, END = 256, 257


def framed(texts, max_length, long_texts):
    """The examples of `texts` (lists of ids) as lists, and the text of each."""
    lengths = np.array([len(ids) for ids in texts], np.int64)
    values = np.array([i for ids in texts for i in ids], np.uint16)
    tokenizer = SimpleNamespace(begin_id=BEGIN, end_id=END, vocab_size=258)
    settings = BuildConfig(max_length=max_length, long_texts=long_texts)
    found = frame(lengths, values, tokenizer, settings, Counter())
    ends = np.cumsum(found.lengths)
    assert len(found.values) == (ends[-1] if len(ends) else 0)
    return [v.tolist() for v in np.split(found.values, ends[:-1])], found.origin.tolist()


@pytest.mark.parametrize("long_texts", ["cut", "split"])
@pytest.mark.parametrize(
    "ids, examples",
    [
        ([], [[BEGIN, END]]),
        ([1, 2], [[BEGIN, 1, 2, END]]),
        ([1, 2, 3], [[BEGIN, 1, 2, 3]]),
        ([1, 2, 3, 4, 5], [[BEGIN, 1, 2, 3], [BEGIN, 4, 5, END]]),
        ([1, 2, 3, 4, 5, 6], [[BEGIN, 1, 2, 3], [BEGIN, 4, 5, 6]]),
    ],
)
def test_every_example_begins_and_ends_if_there_is_room(ids, examples, long_texts):
    expected = examples if long_texts == "split" else examples[:1]
    found, origin = framed([[9], ids, [8]], 4, long_texts)
    assert found == [[BEGIN, 9, END], *expected, [BEGIN, 8, END]]
    assert origin == [0, *[1] * len(expected), 2]


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=10), st.integers(2, 9))
def test_splitting_loses_nothing(texts, max_length):
    examples, origin = framed(texts, max_length, "split")
    assert all(len(e) <= max_length and e[0] == BEGIN for e in examples)
    for number, ids in enumerate(texts):
        own = [e for e, text in zip(examples, origin, strict=True) if text == number]
        assert [i for e in own for i in e if i < BEGIN] == [*ids]
