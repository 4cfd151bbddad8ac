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


@pytest.mark.privacy
@pytest.mark.parametrize("revision", ["", "@v1"])
def test_a_split_is_that_of_its_files_at_one_commit(revision, tmp_path, publish, monkeypatch):
    """Read as local files are: no type is guessed of an id."""
    files = {f"data/train-{i}.jsonl": row(i, "NA") for i in ("007", 7, "1e1")}
    place, asked = publish({**files, "data/test.jsonl": row(), "README.md": "# about"})
    download, patterns = huggingface_hub.snapshot_download, []

    def noted(name, *, allow_patterns, **options):
        patterns.extend(allow_patterns)
        return download(name, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", noted)
    found = build(f"hf:org/name{revision}", tmp_path / "a", **OPTIONS)
    read = build(place / "data" / "train-*", tmp_path / "b", **OPTIONS)
    assert found.train.user_ids() == ["007", "1e1", "7"] and patterns == sorted(files)
    assert found.train.fingerprint == read.train.fingerprint
    (about,) = found.metadata["hub"]
    assert (about["name"], about["revision"]) == ("org/name", NEWEST)
    assert asked == [("org/name", revision[1:] or None), ("org/name", NEWEST)]


FILES = [
    ("train.csv test.csv README.md", None, "train.csv"),
    ("data/train-00.csv data/train-01.csv data/dev.csv", "data/dev*", "data/dev.csv"),
    ("train/1/a.csv train/2/a.csv test/a.csv", None, "train/1/a.csv train/2/a.csv"),
    ("a/[de]/train.csv a/en/train.csv", "a/[[]de]/*", "a/[de]/train.csv"),
    ("a.csv a.jsonl old/a.csv", "*.csv", "a.csv old/a.csv"),
    ("train.json dataset_infos.json constrain.csv", None, "train.json"),
]
UNCLEAR = ["train.jsonl train.csv", "en/train.jsonl de/train.jsonl", "README.md", "a.csv"]


@pytest.mark.parametrize("names, pattern, expected", FILES)
def test_which_files_are_read(names, pattern, expected, publish):
    place, _ = publish(dict.fromkeys(names.split(), ""))
    found = HubSource("org/name", NEWEST, pattern).files()
    assert [path.relative_to(place).as_posix() for path in found] == expected.split()


@pytest.mark.privacy
@pytest.mark.parametrize("names", UNCLEAR)
def test_what_may_be_the_same_rows_twice_or_is_not_there_is_refused(names, tmp_path, publish):
    publish(dict.fromkeys(names.split(), row()))
    with refuses("data", says="hf:org/name:FILES"):
        build("hf:org/name", tmp_path / "out")


@pytest.mark.parametrize("status, kind", [(503, Interrupted), (429, Interrupted), (401, DataError)])
def test_a_busy_server_may_pass_and_a_refusal_does_not(tmp_path, monkeypatch, status, kind):
    def answer(*_, **__):
        error = OSError(f"status {status}")
        error.response = SimpleNamespace(status_code=status)  # pyright: ignore
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
    with pytest.raises(kind, match=f"hf:a/b .*status {status}") as raised:
        build("hf:a/b", tmp_path / "out")
    assert type(raised.value) is kind and not list(tmp_path.iterdir())
