"""Near duplicates: what is found is what the definition says, and cheap candidates lose nothing."""

import pyarrow as pa
import pyarrow.parquet as pq

from experiments.data.neardup import are_similar, build_index, shingles
from fedsim.data.building.build import Pool
from fedsim.data.building.columns import Columns
from fedsim.data.building.sources import cut

COLUMNS = Columns("", ("text",))


def article(rng, words=300):
    return [f"w{i}" for i in rng.integers(0, 3_000, words)]


def edited(rng, words, share):
    """The words with a share of them replaced."""
    found = list(words)
    for place in rng.choice(len(words), round(share * len(words)), replace=False):
        found[place] = "other"
    return found


def index_of(tmp_path, texts):
    pq.write_table(pa.table({"text": texts}), tmp_path / "known.parquet")
    parts = [(part, COLUMNS) for part in cut(tmp_path / "known.parquet", COLUMNS)]
    with Pool(1, None) as pool:
        return build_index(parts, tmp_path / "index", pool)


def test_everything_above_the_thresholds_is_found_and_nothing_else(tmp_path, rng):
    known = [article(rng) for _ in range(150)]
    texts = [" ".join(edited(rng, words, i / 3_000)) for i, words in enumerate(known)]
    expected = [are_similar(t, " ".join(k)) for t, k in zip(texts, known, strict=True)]
    found = index_of(tmp_path, [" ".join(words) for words in known]).found_in(texts)
    assert 30 < sum(expected) < 140
    assert found.tolist() == expected  # P(candidate) at 0.8 is 0.997: the fixed seed has no miss
    assert not index_of(tmp_path, []).directory.joinpath("000001.keys").exists()


def test_both_similarities_count():
    words = [f"w{i}" for i in range(100)]
    assert are_similar(" ".join(words), " ".join(words))
    moved = words[50:] + words[:50]  # nearly the same 5-grams in another order
    assert len(shingles(" ".join(moved)) & shingles(" ".join(words))) == 92
    assert not are_similar(" ".join(words), " ".join(moved))


def test_short_texts_are_compared_whole(tmp_path):
    assert shingles("one  two\nthree") == {"one two three"}
    index = index_of(tmp_path, ["Thank you.", "Yes."])
    assert index.found_in(["Thank  you.", "No.", "Yes. Yes."]).tolist() == [True, False, False]
