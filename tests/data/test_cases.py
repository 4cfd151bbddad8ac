"""The table of cases: each file in tests/cases is read as its case.json says, or refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedsim.data.building.build import build
from fedsim.errors import DataError

CASES = sorted(path.parent for path in (Path(__file__).parents[1] / "cases").glob("*/case.json"))
SECRET = "xyzzy"  # in texts of refused files
ALL_IN_TRAIN = {"eval_users": 0, "eval_examples": False, "num_workers": 1}
SAID = ("user_ids_like_nobody", "rows_without_user_dropped", "empty_texts_dropped", "chats_skipped")
SAID += ("texts_spelling_special_tokens", "users_that_look_alike")


def text_of(tokens):
    return bytes(token for token in tokens.tolist() if token < 256).decode()


def rows_of(store):
    """[owner or owners, text, of a chat the trained text] of each example."""
    if store is None:
        return []
    ids, graph, numbers = store.user_ids(), store.owners, np.arange(store.num_examples)
    sets = np.repeat(np.arange(len(store.offsets) - 1), np.diff(store.offsets)).tolist()
    owners = [ids[i] if graph is None else [ids[u] for u in graph.users_of(i)] for i in sets]
    tokens, sizes = store.gather(numbers, store.max_length)
    rows = [[who, text_of(t[:n])] for who, t, n in zip(owners, tokens, sizes, strict=True)]
    trained = store.trained(numbers, store.max_length)
    if trained is not None:
        chosen = zip(rows, tokens, sizes, trained, strict=True)
        rows = [[*row, text_of(t[:n][own[:n]])] for row, t, n, own in chosen]
    return rows


def outcome(case, settings, out):
    """What is built of the inputs of a case, or the field and the line of the refusal."""
    settings = ALL_IN_TRAIN | settings
    if "chat_template" in settings:
        settings["chat_template"] = case / settings["chat_template"]
    try:
        data = build(sorted(case.glob("input*")), out, **settings)
    except DataError as error:
        return {"refused": error.field or "data", "said": str(error)}
    counts = data.metadata["counts"]
    found = {"rows": rows_of(data.train), "test": rows_of(data.test)}
    found["counts"] = {name: counts[name] for name in SAID if counts.get(name)}
    return {name: value for name, value in found.items() if value}


@pytest.mark.privacy
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_is_read_or_refused_as_its_case_says(case, tmp_path):
    expected = json.loads((case / "case.json").read_text())
    found = outcome(case, expected.pop("settings", {}), tmp_path / "out")
    said, parts = found.pop("said", ""), expected.pop("says", [])
    assert found == expected
    assert all(part in said for part in parts), said
    assert "\n" not in said and SECRET not in said and said.isprintable()
    assert [path.name for path in tmp_path.iterdir()] == ([] if "refused" in found else ["out"])
