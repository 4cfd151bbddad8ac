"""The snippets and the commands of docs/formats.md make rows of small files in these formats."""

import runpy
import shutil

import numpy as np
import pytest
from chats import model_files
from test_docs import ROOT, blocks, lines_of

from fedsim.cli.main import main
from fedsim.data.dataset import Dataset, shown

PAGE, FILES = ROOT / "docs/formats.md", ROOT / "tests/prose/formats"
ANN, BEN, CAT, DAN = (f"U0{i}" for i in range(1, 5))
# The owners of the rows that the command of each section builds.
OWNERS = {
    "openai": [("c1",), ("c1",), ("c2",)],
    "sharegpt": [("u7",), ("u8",)],
    "slack-rooms": [(ANN,), (ANN, BEN), (ANN, BEN, CAT), (ANN, BEN, CAT), (BEN,), (BEN, DAN)],
    "zendesk": [("507", "9001", "9002"), ("612", "9001")],
    "threads": [("ann@home.example", "ben@home.example"), ("eve@work.example",)],
}
ANSWERS = (
    "It left our store today.",
    "Here it is.",
    "Another one, for  salt & pepper .",
    "(no text)",
)
"""Of the mails; the third is of HTML, the last of an image."""


def owners(store):
    """The owners of every example."""
    ids, graph = store.user_ids(), store.owners
    if graph is None:
        return [(ids[u],) for u in np.repeat(np.arange(store.num_users), store.examples_per_user)]
    sets = np.repeat(np.arange(graph.num_sets), np.diff(store.offsets))
    return [tuple(ids[u] for u in graph.users_of(number)) for number in sets]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with the files of the page, after its snippets and commands ran in it."""
    place = tmp_path_factory.mktemp("formats") / "here"
    shutil.copytree(FILES, place)
    model_files(place / "instruct")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for number, block in enumerate(blocks(PAGE, "python")):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), {})
        for block in blocks(PAGE, "sh"):
            for words in lines_of(block):
                if words[0] == "python":
                    runpy.run_path(str(ROOT / words[1]))
                else:
                    main(words[1:])
    return place


@pytest.mark.parametrize("name", OWNERS)
def test_a_format_becomes_rows_with_their_owners(name, made):
    data = Dataset.open(made / name)
    found = [each for store in data.splits().values() for each in owners(store)]
    assert sorted(found) == OWNERS[name]


def test_answers_of_mails_are_texts_whatever_their_form(made):
    data = Dataset.open(made / "threads")
    rows = [row for split, store in data.splits().items() for row in shown(data, split, 10)]
    trained = {part["text"] for row in rows for part in row["parts"] if part["trained"]}
    assert len(trained) == len(ANSWERS)
    assert all(any(answer in text for text in trained) for answer in ANSWERS)
