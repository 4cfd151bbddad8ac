"""Data sets of the Hub: local directories in their form, and a cache of the Hub's library."""

import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from fedsim.data.building.build import build
from fedsim.data.building.hub import HubSource
from fedsim.errors import DataError, Interrupted

ROWS = [(f"user {i % 7}", f"text {i}") for i in range(120)]
OPTIONS = {"eval_users": 0, "eval_examples": False}


def table(rows):
    return pa.table(
        {"who": [u for u, _ in rows], "what": [t for _, t in rows], "n": [0] * len(rows)}
    )


@pytest.fixture
def columns():
    return {"user_column": "who", "text_column": "what", **OPTIONS}


@pytest.fixture
def repository(tmp_path):
    """A data set as on the Hub: two configurations, splits, a split of several files."""
    (tmp_path / "repo" / "small").mkdir(parents=True)
    for number in range(3):
        rows = ROWS[40 * number : 40 * (number + 1)]
        pq.write_table(table(rows), tmp_path / "repo" / f"train-{number}.parquet")
    pq.write_table(table(ROWS[:9]), tmp_path / "repo" / "test.parquet")
    pq.write_table(table(ROWS[:5]), tmp_path / "repo" / "small" / "train.parquet")
    splits = [{"split": "train", "path": "train-*"}, {"split": "test", "path": "test*"}]
    configs = [
        {"config_name": "default", "data_files": splits},
        {"config_name": "small", "data_files": "small/*"},
    ]
    card = f"---\nconfigs: {json.dumps(configs)}\n---\n"
    (tmp_path / "repo" / "README.md").write_text(card)
    return tmp_path / "repo"


def test_a_split_is_that_of_its_files(repository, tmp_path, columns):
    found = build(f"hf:{repository}", tmp_path / "a", **columns)
    read = build(repository / "train-*.parquet", tmp_path / "b", **columns)
    assert found.train.num_examples == 120
    assert found.train.fingerprint == read.train.fingerprint
    (about,) = found.metadata["hub"]
    assert (about["split"], about["config"], about["revision"]) == ("train", None, None)
    assert {path.name for path in tmp_path.iterdir()} == {"repo", "a", "b"}


def test_configuration_and_split_are_chosen(repository, tmp_path, columns):
    assert build(f"hf:{repository}:small", tmp_path / "a", **columns).train.num_examples == 5
    assert (
        build(f"hf:{repository}", tmp_path / "b", split="test", **columns).train.num_examples == 9
    )


NEWEST = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(repository, tmp_path, monkeypatch):
    """The same data set as `org/name` in a cache of the Hub's library, whose server lists it."""
    place = tmp_path / "cache" / "datasets--org--name"
    (place / "snapshots").mkdir(parents=True)
    shutil.copytree(repository, place / "snapshots" / NEWEST)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    names = [f.relative_to(repository).as_posix() for f in repository.rglob("*") if f.is_file()]
    found = SimpleNamespace(sha=NEWEST, siblings=[SimpleNamespace(rfilename=n) for n in names])
    asked = []

    def dataset_info(_, name, revision=None):
        asked.append((name, revision))
        return found

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    return asked


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_data_set_of_the_hub_is_that_of_one_commit(
    cached, repository, tmp_path, columns, revision
):
    found = build("hf:org/name", tmp_path / "a", revision=revision, **columns)
    read = build(repository / "train-*.parquet", tmp_path / "b", **columns)
    assert found.train.fingerprint == read.train.fingerprint
    assert found.metadata["hub"][0]["revision"] == NEWEST
    assert cached == [("org/name", revision), ("org/name", NEWEST)]


def test_only_the_files_of_the_split_are_downloaded(cached, tmp_path, columns, monkeypatch):
    download, asked = huggingface_hub.snapshot_download, []

    def noted(name, *, allow_patterns, **options):
        asked.append((allow_patterns, options["revision"]))
        return download(name, allow_patterns=allow_patterns, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", noted)
    build("hf:org/name:small", tmp_path / "a", **columns)
    assert asked == [(["README.md"], NEWEST), (["small/train.parquet"], NEWEST)]


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


@pytest.mark.parametrize(
    "names, configs, source, split, expected",
    [
        (["train.csv", "test.csv", "README.md"], None, "", "test", ["test.csv"]),
        (
            ["data/train-00-of-02.csv", "data/train-01-of-02.csv", "data/dev.csv"],
            None,
            "",
            "train",
            ["data/train-00-of-02.csv", "data/train-01-of-02.csv"],
        ),
        (["data/train-00.csv", "data/dev.csv"], None, "", "validation", ["data/dev.csv"]),
        (["constraint.csv", "contest.csv"], None, "", "train", ["constraint.csv", "contest.csv"]),
        (["en/train.csv", "de/train.csv"], None, "de", "train", ["de/train.csv"]),
        (["a.csv", "old/a.csv", ".a.csv"], "*.csv", "", "train", ["a.csv"]),
        (["a.csv", "old/a.csv"], "**/*.csv", "", "train", ["a.csv", "old/a.csv"]),
        (["[1].csv", "1.csv"], "[1].csv", "", "train", ["[1].csv"]),
        (["b.csv", "a.csv"], ["b.csv", "./a.csv"], "", "train", ["a.csv", "b.csv"]),
        (["train.json", "dataset_infos.json"], None, "", "train", ["train.json"]),
    ],
)
def test_which_files_a_split_has(tmp_path, names, configs, source, split, expected):
    place = tmp_path / "repo"
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).touch()
    if configs is not None:
        config = json.dumps([{"config_name": "default", "data_files": configs}])
        (place / "README.md").write_text(f"---\nconfigs: {config}\n---\n")
    found = HubSource.parse(f"hf:{place}:{source}", split, None).files()
    assert [path.relative_to(place).as_posix() for path in found] == expected


@pytest.mark.parametrize(
    "config, split, expected",
    [
        (None, "dev", "split=dev: expected a split of hf:.* with files, it has: test, train"),
        ("large", None, ":CONFIG, one of default, small"),
    ],
)
def test_a_split_or_configuration_that_is_not_there_is_refused(
    repository, tmp_path, columns, config, split, expected
):
    with pytest.raises(DataError, match=expected):
        build(f"hf:{repository}:{config or ''}", tmp_path / "out", split=split, **columns)


@pytest.mark.privacy
def test_the_same_rows_in_two_kinds_of_files_are_not_read_twice(repository, tmp_path, columns):
    (repository / "train-0.csv").write_text("who,what\nann,hello\n")
    with pytest.raises(DataError, match="files of one kind, found .csv and .parquet"):
        build(f"hf:{repository}", tmp_path / "out", **columns)


@pytest.mark.privacy
def test_a_card_with_aliases_is_refused(repository, tmp_path, columns):
    lines = ["a0: &a0 [x, x]", *(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]" for i in range(40))]
    (repository / "README.md").write_text("\n".join(["---", *lines, "configs: *a40", "---"]))
    with pytest.raises(DataError, match="README.md: expected a list of configurations in YAML"):
        build(f"hf:{repository}", tmp_path / "out", **columns)


def write_text(path, kind):
    """Ids and texts that readers which guess at types change, some of them in a later file."""
    path.mkdir()
    rows = [(7, "first"), (10, "second")], [("007", "None"), ("07", "2020-01-01"), ("1e1", "NA")]
    for number, some in enumerate(rows):
        if kind == "jsonl":
            lines = [json.dumps({"who": who, "what": what}) for who, what in some]
        else:
            between = "\t" if kind == "tsv" else ","
            lines = [between.join((str(a), b)) for a, b in [("who", "what"), *some]]
        (path / f"train-{number}.{kind}").write_text("\n".join(lines))
    return path


@pytest.mark.privacy
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_text_files_of_the_hub_are_read_as_local_ones(kind, tmp_path, columns):
    there = write_text(tmp_path / "repo", kind)
    found = build(f"hf:{there}", tmp_path / "a", **columns)
    read = build(there, tmp_path / "b", **columns)
    assert found.train.user_ids() == ["007", "07", "10", "1e1", "7"]
    assert found.train.fingerprint == read.train.fingerprint
    assert found.metadata["counts"] == read.metadata["counts"]


@pytest.mark.privacy
def test_text_files_that_need_a_setting_are_refused(tmp_path, columns):
    there = write_text(tmp_path / "repo", "csv")
    config = {"config_name": "default", "data_files": "*.csv", "sep": ";"}
    (there / "README.md").write_text(f"---\nconfigs: {json.dumps([config])}\n---\n")
    with pytest.raises(DataError, match="expected files without sep=;; download the files and"):
        build(f"hf:{there}", tmp_path / "out", **columns)
