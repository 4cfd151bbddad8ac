"""Other ways to keep users' examples, each in a process of its own; run by benchmarks/data.py.

    python data_stores.py KIND SLICE DIRECTORY

SLICE.npz holds `offsets` [users + 1] of rows, `lengths` [rows] and `values`, their token ids. The
process builds its store and prints {"build_s", "bytes", "examples"}; then, for every line of user
numbers on its input, it reads at most 16 examples of each, padded to [users, 16, 128], and prints
{"seconds", "users"}. Nothing of fedsim is imported: a peer may need other versions of everything.
"""

import json
import os
import sqlite3
import sys
import time
import zlib
from pathlib import Path

import numpy as np

GROUP, LENGTH = 16, 128
TFRECORD_EXAMPLES = 10_000  # Dataset Grouper builds some hundreds a second


class Slice:
    """The examples of some users."""

    def __init__(self, file):
        with np.load(file) as found:
            self.offsets, self.lengths = found["offsets"], found["lengths"]
            self.values = found["values"]
        self.ends = np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def num_users(self):
        return len(self.offsets) - 1

    def rows(self, user):
        """The user's examples, as arrays."""
        low, high = self.offsets[user], self.offsets[user + 1]
        return np.split(
            self.values[self.ends[low] : self.ends[high]],
            self.ends[low + 1 : high] - self.ends[low],
        )

    def blob(self, user):
        """Lengths and ids of a user, compressed, as FedJAX keeps them."""
        low, high = self.offsets[user], self.offsets[user + 1]
        ids = self.values[self.ends[low] : self.ends[high]]
        lengths = self.lengths[low:high].astype(np.int32)
        return zlib.compress(np.int32(high - low).tobytes() + lengths.tobytes() + ids.tobytes())


def chosen(number):
    """Which of `number` examples a group takes."""
    if number <= GROUP:
        return range(number)
    return np.sort(np.random.default_rng().choice(number, GROUP, replace=False)).tolist()


def padded(groups):
    """[users, 16, 128] of lists of arrays."""
    batch = np.zeros((len(groups), GROUP, LENGTH), np.int32)
    for user, rows in enumerate(groups):
        for place, row in enumerate(rows):
            batch[user, place, : min(len(row), LENGTH)] = row[:LENGTH]
    return batch


class SqliteBlob:
    """SQLite, one compressed blob per user (FedJAX)."""

    def __init__(self, data, directory):
        self.db = sqlite3.connect(directory / "blob.sqlite")
        self.db.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, data BLOB)")
        rows = ((user, data.blob(user)) for user in range(data.num_users))
        self.db.executemany("INSERT INTO users VALUES (?, ?)", rows)
        self.db.commit()

    def read(self, user):
        (blob,) = self.db.execute("SELECT data FROM users WHERE id = ?", (user,)).fetchone()
        raw = zlib.decompress(blob)
        (number,) = np.frombuffer(raw, np.int32, 1)
        lengths = np.frombuffer(raw, np.int32, number, 4)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.frombuffer(raw, np.uint16, int(ends[-1]), 4 + 4 * int(number))
        return [ids[ends[i] : ends[i + 1]] for i in chosen(int(number))]


class SqliteRows:
    """SQLite, one row per example with an index on the user (TensorFlow Federated)."""

    def __init__(self, data, directory):
        self.db = sqlite3.connect(directory / "rows.sqlite")
        self.db.execute("CREATE TABLE examples (user INTEGER, data BLOB)")
        rows = ((u, row.tobytes()) for u in range(data.num_users) for row in data.rows(u))
        self.db.executemany("INSERT INTO examples VALUES (?, ?)", rows)
        self.db.execute("CREATE INDEX of_user ON examples (user)")
        self.db.commit()

    def read(self, user):
        rows = self.db.execute("SELECT data FROM examples WHERE user = ?", (user,)).fetchall()
        return [np.frombuffer(rows[i][0], np.uint16) for i in chosen(len(rows))]


class ParquetGroups:
    """Parquet, a row group per user."""

    def __init__(self, data, directory):
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema({"tokens": pa.list_(pa.uint16())})
        with pq.ParquetWriter(directory / "users.parquet", schema) as writer:
            for user in range(data.num_users):
                writer.write_table(pa.table({"tokens": data.rows(user)}, schema))
        self.file = pq.ParquetFile(directory / "users.parquet")

    def read(self, user):
        rows = self.file.read_row_group(user)["tokens"].combine_chunks()
        offsets, values = rows.offsets.to_numpy(), rows.values.to_numpy()
        return [values[offsets[i] : offsets[i + 1]] for i in chosen(len(rows))]


class Hdf5:
    """HDF5, a group per user (pfl)."""

    def __init__(self, data, directory):
        import h5py

        with h5py.File(directory / "users.h5", "w") as file:
            for user in range(data.num_users):
                group = file.create_group(str(user))
                low, high = data.offsets[user], data.offsets[user + 1]
                group["lengths"] = data.lengths[low:high]
                group["values"] = data.values[data.ends[low] : data.ends[high]]
        self.file = h5py.File(directory / "users.h5", "r")

    def read(self, user):
        group = self.file[str(user)]
        ends = np.concatenate([[0], np.cumsum(group["lengths"][:])])
        values = group["values"][:]
        return [values[ends[i] : ends[i + 1]] for i in chosen(len(ends) - 1)]


class DatasetGrouper:
    """Dataset Grouper: TFRecords of serialised groups. A stream; which users come is its affair."""

    def __init__(self, data, directory):
        import apache_beam as beam
        import tensorflow as tf
        import tensorflow_datasets as tfds
        from dataset_grouper import beam_transforms, data_loaders

        features = tfds.features.FeaturesDict(
            {"user": tf.int64, "tokens": tfds.features.Sequence(tf.int32)}
        )
        users = np.searchsorted(data.offsets, TFRECORD_EXAMPLES, side="right") - 1
        self.num_examples = int(data.offsets[users])
        examples = [
            {"user": np.int64(user), "tokens": row.astype(np.int32)}
            for user in range(users)
            for row in data.rows(user)
        ]
        prefix = str(directory / "groups.tfrecord")
        with beam.Pipeline() as root:
            tensors = root | beam.Create(examples) | beam.Map(_as_tensors)
            keyed = beam_transforms.to_keyed_sequence_examples(
                tensors, lambda example: b"%d" % example["user"].numpy(), features
            )
            coder = beam.coders.ProtoCoder(tf.train.SequenceExample)
            write = beam.io.tfrecordio.WriteToTFRecord(prefix, coder=coder)
            _ = keyed | beam.Map(lambda pair: pair[1]) | write
        loader = data_loaders.PartitionedDataset(prefix + "*", features)
        self.stream = iter(loader.build_group_stream().repeat())

    def read(self, user):
        rows = [example["tokens"].numpy() for example in next(self.stream)]
        return [rows[i] for i in chosen(len(rows))]


def _as_tensors(example):
    import tensorflow as tf

    return {name: tf.constant(value) for name, value in example.items()}


KINDS = {
    "sqlite-blob": SqliteBlob,
    "sqlite-rows": SqliteRows,
    "parquet-groups": ParquetGroups,
    "hdf5": Hdf5,
    "dataset-grouper": DatasetGrouper,
}


def main():
    kind, file, directory = sys.argv[1:]
    data, directory = Slice(file), Path(directory)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    start = time.perf_counter()
    store = KINDS[kind](data, directory)
    size = sum(path.stat().st_size for path in directory.iterdir())
    examples = getattr(store, "num_examples", int(data.offsets[-1]))
    found = {"build_s": time.perf_counter() - start, "bytes": size, "examples": examples}
    print(json.dumps(found), file=answers, flush=True)
    for line in sys.stdin:
        users = json.loads(line)
        start = time.perf_counter()
        padded([store.read(user) for user in users])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "users": len(users)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
