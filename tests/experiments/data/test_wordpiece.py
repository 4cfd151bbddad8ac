"""WordPieces that are learnt from public text."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.data import wordpiece
from fedsim.data import Tokenizer, is_held_out
from fedsim.data.building.columns import Columns

WORDS = ["the cat sat on the mat, the cat ran", "a mat is not a cat \u65e5 \xe9"] * 5


def test_words_become_pieces(tmp_path):
    tokenizer = Tokenizer.load(wordpiece.learn(lambda: WORDS, 300, tmp_path / "a.json"))
    (ids,) = tokenizer.encode_batch(["The CAT sat"])
    assert tokenizer.vocab_size <= 300
    assert len(ids) == 3 and tokenizer.decode(ids) == "the cat sat"


@pytest.mark.slow
@pytest.mark.ci
def test_it_is_the_same_in_every_process(tmp_path):
    code = (
        "import pathlib, sys\n"
        "from experiments.data import wordpiece\n"
        "texts = ['the cat sat on the mat \\u65e5 \\xe9', 'abc bcd cde def', 'xyz zyx yxz'] * 3\n"
        "wordpiece.learn(lambda: texts, 300, pathlib.Path(sys.argv[1]))"
    )
    files = [tmp_path / f"{number}.json" for number in range(3)]
    for file in files:
        subprocess.run([sys.executable, "-c", code, str(file)], check=True)
    assert len({file.read_bytes() for file in files}) == 1


def test_texts_are_those_of_users_who_are_not_held_out(tmp_path):
    users = [f"u{i}" for i in range(100)]
    table = pa.table({"user_id": users, "text": [f"text of {user}" for user in users]})
    pq.write_table(table, tmp_path / "a.parquet")
    given = [tmp_path / "a.parquet"], Columns(), 0.3, 100
    kept = [f"text of {user}" for user in users if not is_held_out(user, 0.3)]
    assert [*wordpiece.texts_of(*given)] == kept and len(kept) < 90
