"""Data sets of the Hub, through the library's own code and a local data set directory."""

import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import IterableDataset as HubStream

from fedsim.data.building.build import build
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


def test_a_streamed_data_set_is_the_one_of_its_files(repository, tmp_path, columns):
    streamed = build(f"hf:{repository}", tmp_path / "a", **columns)
    read = build(repository / "train-*.parquet", tmp_path / "b", **columns)
    assert streamed.train.num_examples == 120
    assert streamed.train.fingerprint == read.train.fingerprint
    (about,) = streamed.metadata["hub"]
    assert (about["split"], about["config"], about["revision"]) == ("train", None, None)
    assert {path.name for path in tmp_path.iterdir()} == {"repo", "a", "b"}


def test_configuration_and_split_are_chosen(repository, tmp_path, columns):
    assert build(f"hf:{repository}:small", tmp_path / "a", **columns).train.num_examples == 5
    assert (
        build(f"hf:{repository}", tmp_path / "b", split="test", **columns).train.num_examples == 9
    )


def test_a_fetch_that_was_interrupted_fetches_the_rest_only(repository, tmp_path, columns):
    def stop(line):
        if line.startswith("tokenised"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(f"hf:{repository}", tmp_path / "a", progress=stop, **columns)
    fetched = sorted((tmp_path / ".a.building" / "fetched").iterdir())
    assert len(fetched) == 3
    before = [path.stat().st_mtime_ns for path in fetched]
    seen = []

    def look(line):
        if line.startswith("tokenised"):
            seen.extend(path.stat().st_mtime_ns for path in fetched)

    build(f"hf:{repository}", tmp_path / "a", progress=look, **columns)
    assert seen == before


@pytest.fixture
def unreliable(monkeypatch):
    """Makes the network fail at the given times of reading; gives the pauses that there were."""

    def fail(times):
        read, count, pauses = HubStream.iter, itertools.count(1), []

        def read_or_fail(self, *args, **options):
            if next(count) in times:
                raise ConnectionError("Connection reset by peer")
            yield from read(self, *args, **options)

        monkeypatch.setattr(HubStream, "iter", read_or_fail)
        monkeypatch.setattr("fedsim.data.building.hub.sleep", pauses.append)
        return pauses

    return fail


def test_what_the_network_did_not_bring_is_asked_for_again(
    repository, tmp_path, columns, unreliable
):
    pauses = unreliable(times=(2, 3))
    data = build(f"hf:{repository}", tmp_path / "a", **columns)
    assert data.train.num_examples == 120
    assert len(pauses) == 2 and 0 < pauses[0] < pauses[1]


def test_a_network_that_stays_away_leaves_what_was_fetched(
    repository, tmp_path, columns, unreliable
):
    pauses = unreliable(times=range(2, 6))
    with pytest.raises(Interrupted, match="reset by peer.*same command goes on where it was"):
        build(f"hf:{repository}", tmp_path / "a", **columns)
    fetched = list((tmp_path / ".a.building" / "fetched").glob("*.parquet"))
    assert len(fetched) == 1 and len(pauses) == 3
    before, seen = fetched[0].stat().st_mtime_ns, []

    def look(line):
        if line.startswith("tokenised"):
            seen.append(fetched[0].stat().st_mtime_ns)

    data = build(f"hf:{repository}", tmp_path / "a", progress=look, **columns)
    assert data.train.num_examples == 120 and seen == [before]


def test_a_hub_out_of_reach_is_no_mistake_and_leaves_nothing_begun(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for options in ({}, {"tokenizer": "hf:a/tokenizer"}):
        with pytest.raises(Interrupted, match="hf:a/.*the same command goes on where it was"):
            build("hf:a/b", tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


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
    streamed = build(f"hf:{there}", tmp_path / "a", **columns)
    read = build(there, tmp_path / "b", **columns)
    assert streamed.train.user_ids() == ["007", "07", "10", "1e1", "7"]
    assert streamed.train.fingerprint == read.train.fingerprint
    assert streamed.metadata["counts"] == read.metadata["counts"]


@pytest.mark.privacy
def test_text_files_that_only_their_library_reads_are_refused(tmp_path, columns):
    there = write_text(tmp_path / "repo", "csv")
    config = {"config_name": "default", "data_files": "*.csv", "sep": ";"}
    (there / "README.md").write_text(f"---\nconfigs: {json.dumps([config])}\n---\n")
    with pytest.raises(DataError, match="expected files without sep=;; download the files and"):
        build(f"hf:{there}", tmp_path / "out", **columns)


@pytest.mark.privacy
def test_ids_that_change_their_type_are_refused_and_not_cast(
    repository, tmp_path, columns, monkeypatch
):
    """Cast to the numbers before it, the text 007 would be the user 7."""
    pieces = [pa.table({"who": ids, "what": ["x"]}) for ids in ([7], ["007"])]
    monkeypatch.setattr(HubStream, "iter", lambda *_, **__: iter(pieces))
    with pytest.raises(
        DataError, match="who: expected one type in all files, got int64 and string"
    ):
        build(f"hf:{repository}", tmp_path / "out", **columns)
