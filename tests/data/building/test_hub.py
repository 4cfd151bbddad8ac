"""Data sets of the Hub, in a cache of the Hub's library on this machine."""

import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants
from refused import refuses

from fedsim.data.building.build import build
from fedsim.data.building.sources import HubSource
from fedsim.errors import DataError, Interrupted

OPTIONS = {"eval_users": 0, "eval_examples": False}
NEWEST = "0123456789abcdef0123456789abcdef01234567"


def row(user="ann", text="a day"):
    return json.dumps({"user_id": user, "text": text}) + "\n"


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """Puts files, {name: text}, into a cache as `org/name`, whose server lists them."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    asked = []

    def published(files):
        place = tmp_path / "cache" / "datasets--org--name" / "snapshots" / NEWEST
        for name, text in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        about = SimpleNamespace(sha=NEWEST, siblings=[SimpleNamespace(rfilename=n) for n in files])

        def dataset_info(_, name, revision=None):
            asked.append((name, revision))
            return about

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        return place, asked

    return published


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_split_is_that_of_its_files_at_one_commit(revision, tmp_path, publish):
    files = {f"data/train-{i}.jsonl": row("ann", str(i)) for i in range(3)}
    place, asked = publish({**files, "data/test.jsonl": row(), "README.md": "# about"})
    found = build("hf:org/name", tmp_path / "a", revision=revision, **OPTIONS)
    read = build(place / "data" / "train-*", tmp_path / "b", **OPTIONS)
    assert found.train.num_examples == 3
    assert found.train.fingerprint == read.train.fingerprint
    (about,) = found.metadata["hub"]
    assert (about["split"], about["config"], about["revision"]) == ("train", None, NEWEST)
    assert asked == [("org/name", revision), ("org/name", NEWEST)]


def test_only_the_files_of_the_split_are_downloaded(tmp_path, publish, monkeypatch):
    publish({"small/train.jsonl": row(), "small/test.jsonl": row(), "[1]/train.jsonl": row()})
    download, asked = huggingface_hub.snapshot_download, []

    def noted(name, *, allow_patterns, **options):
        asked.append((allow_patterns, options["revision"]))
        return download(name, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", noted)
    build("hf:org/name:small", tmp_path / "a", **OPTIONS)
    build("hf:org/name:[1]", tmp_path / "b", **OPTIONS)
    assert asked == [(["small/train.jsonl"], NEWEST), (["[[]1]/train.jsonl"], NEWEST)]


@pytest.mark.parametrize(
    "names, config, split, expected",
    [
        ("train.csv test.csv README.md", "", "test", "test.csv"),
        ("d/train-00.csv d/train-01.csv d/dev.csv", "", "train", "d/train-00.csv d/train-01.csv"),
        ("data/train-00.csv data/dev.csv", "", "validation", "data/dev.csv"),
        ("train/1/a.csv train/2/a.csv test/a.csv", "", "train", "train/1/a.csv train/2/a.csv"),
        ("constraint.csv contest.csv", "", "train", "constraint.csv contest.csv"),
        ("en/train.csv de/train.csv", "de", "train", "de/train.csv"),
        ("a/en/train.csv a/de/train.csv", "a/de", "train", "a/de/train.csv"),
        ("a.csv old/a.csv .a.csv", "", "train", "a.csv"),
        ("train.json dataset_infos.json", "", "train", "train.json"),
    ],
)
def test_which_files_a_split_has(names, config, split, expected, publish):
    place, _ = publish(dict.fromkeys(names.split(), ""))
    found = HubSource.parse(f"hf:org/name:{config}", split, NEWEST).files()
    assert [path.relative_to(place).as_posix() for path in found] == expected.split()


@pytest.mark.privacy
@pytest.mark.parametrize(
    "names, options, refused, says",
    [
        ("train.jsonl test.jsonl", {"split": "dev"}, "split=dev", "it has: test, train"),
        ("train.jsonl train.csv", {}, "data", "found csv and jsonl"),
        ("en/train.jsonl de/train.jsonl", {}, "data", "of the folders de, en"),
        ("README.md", {}, "split=train", "it has: none"),
    ],
)
def test_what_may_be_the_same_rows_twice_or_is_not_there_is_refused(
    names, options, refused, says, tmp_path, publish
):
    publish(dict.fromkeys(names.split(), row()))
    with refuses(refused, says=says):
        build("hf:org/name", tmp_path / "out", **options)


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_text_files_of_the_hub_are_read_as_local_ones(kind, tmp_path, publish):
    """Ids and texts that readers which guess at types change, some of them in a later file."""
    files = {}
    rows = [(7, "first"), (10, "second")], [("007", "None"), ("07", "2020-01-01"), ("1e1", "NA")]
    for number, some in enumerate(rows):
        lines = [row(*each) for each in some]
        if kind != "jsonl":
            between = "\t" if kind == "tsv" else ","
            lines = [f"{a}{between}{b}\n" for a, b in [("user_id", "text"), *some]]
        files[f"train-{number}.{kind}"] = "".join(lines)
    place, _ = publish(files)
    found = build("hf:org/name", tmp_path / "a", **OPTIONS)
    read = build(place, tmp_path / "b", **OPTIONS)
    assert found.train.user_ids() == ["007", "07", "10", "1e1", "7"]
    assert found.train.fingerprint == read.train.fingerprint
    assert found.metadata["counts"] == read.metadata["counts"]


def test_a_hub_out_of_reach_is_no_mistake_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Interrupted, match="hf:a/b .*to reach the Hugging Face Hub.*run the same"):
        build("hf:a/b", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("status, kind", [(503, Interrupted), (429, Interrupted), (401, DataError)])
def test_a_busy_server_may_pass_and_a_refusal_does_not(tmp_path, monkeypatch, status, kind):
    def answer(*_, **__):
        error = OSError(f"status {status}")
        error.response = SimpleNamespace(status_code=status)  # pyright: ignore
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
    with pytest.raises(kind, match=f"status {status}") as raised:
        build("hf:a/b", tmp_path / "out")
    assert type(raised.value) is kind
