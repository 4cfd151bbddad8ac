"""Chats whose turns say who speaks: their rows belong to all who do, whatever is trained on."""

import numpy as np
import pytest
from chats import model_files
from test_chats import ALL_IN_TRAIN, lines

from fedsim.data.building.build import build


def turn(role, content, name=None):
    return {"role": role, "content": content} | ({} if name is None else {"name": name})


BOT = [turn("user", "Hi", "ann"), turn("assistant", "Ho")]
DESK = [turn("system", "Be kind."), turn("user", "Hi", "ben"), turn("assistant", "Ho", "dora")]
ROOM = [turn("user", "one", "cat"), turn("user", "two", "ann"), turn("assistant", "three", "7")]
CHATS = (BOT, DESK, ROOM)
OWNERS = {("ann",), ("ben", "dora"), ("7", "ann", "cat")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_files(tmp_path_factory.mktemp("models") / "model")


def owners(store):
    """The owners of every example."""
    ids, graph = store.user_ids(), store.owners
    if graph is None:
        return [(ids[u],) for u in np.repeat(np.arange(store.num_users), store.examples_per_user)]
    sets = np.repeat(np.arange(graph.num_sets), np.diff(store.offsets))
    return [tuple(ids[u] for u in graph.users_of(number)) for number in sets]


def built(tmp_path, model, chats=CHATS, **options):
    file = lines(tmp_path / "chats.jsonl", [{"messages": each} for each in chats])
    how = {"tokenizer": model, "owner_key": "name", **ALL_IN_TRAIN}
    return build(file, tmp_path / "out", **how | options)


@pytest.mark.privacy
@pytest.mark.parametrize("train_on", ["all", "assistant"])
def test_a_chat_belongs_to_all_who_speak_in_it_whatever_is_trained_on(train_on, tmp_path, model):
    store = built(tmp_path, model, train_on=train_on).train
    assert set(owners(store)) == OWNERS and store.num_examples == 3


@pytest.mark.privacy
def test_owners_depend_on_no_text(tmp_path, model):
    """Neither on its length: who is cut off, or says nothing, is an owner, too."""
    first = [turn("assistant", "Ho", "eve"), *BOT[:1], turn("assistant", "x" * 500, "dora")]
    silent = [turn("user", "", "zoe"), *BOT]
    found = owners(built(tmp_path, model, [first, silent], max_length=40).train)
    assert set(found) == {("ann", "dora", "eve"), ("ann", "zoe")}
