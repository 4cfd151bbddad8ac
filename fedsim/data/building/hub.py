"""Data sets of the Hugging Face Hub, streamed: `hf:NAME` or `hf:NAME:CONFIG`.

Only the required columns are kept, as a Parquet file for each shard of the data set, so that each
byte is downloaded once and a build that was killed can resume. CSV and JSON files are copied
unchanged and read as local files: `datasets` would read 007 as 7.
"""

import os
import re
import shutil
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data.building.columns import Columns, is_string, paths
from fedsim.data.building.processes import Pool
from fedsim.data.building.readers import reason_of
from fedsim.data.building.sources import identify
from fedsim.errors import DataError, Interrupted
from fedsim.files import DISK_FULL, expand_home
from fedsim.installation import expect_installed

PREFIX = "hf:"
FETCH_ROWS = 1_000
PAUSES_S = (1.0, 5.0, 25.0)  # before retries
# Local suffix of a CSV or JSON file, by its suffix on the Hub.
TEXTS = {
    f".{kind}{z}": f".{kind}{z}" for kind in ("csv", "tsv", "json", "jsonl") for z in ("", ".gz")
}
TEXTS |= {".ndjson": ".jsonl", ".ndjson.gz": ".jsonl.gz"}
DIRECTLY = "download the files and build from them: `fedsim data build FILE ...`"
# Settings of a builder of `datasets` that do not change how it reads a file.
OF_NO_MATTER = ("name", "version", "data_dir", "data_files", "description", "features")


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hub, or a local directory in the format of one."""

    name: str
    config: str | None
    split: str
    revision: str | None

    @classmethod
    def parse(cls, source: str, split: str | None, revision: str | None) -> "HubSource":
        """Parse hf:NAME or hf:NAME:CONFIG. Default: split train, newest revision.

        Raises:
          DataError: NAME is empty.
          MissingPackage: `datasets` is not installed.
        """
        expect_installed("datasets")
        name, _, config = source.removeprefix(PREFIX).partition(":")
        if not name:
            raise DataError.of("data", source, "hf:NAME or hf:NAME:CONFIG")
        name = expand_home("data", name)  # a local directory
        return cls(name, config or None, split or "train", revision)

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        return f"{PREFIX}{self.name}{config}"

    def open(self) -> Any:
        """Open the data set as a streaming `datasets.IterableDataset`.

        Raises:
          DataError: the data set cannot be streamed.
          Interrupted: the Hub cannot be reached.
        """
        from datasets import load_dataset

        with self.failing():
            return load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=True
            )

    def names(self) -> list[str]:
        """Names of the columns; none if they are not known before the files are read."""
        try:
            stream = self.open()
            return list(stream.column_names or next(iter(stream), ()))
        except DataError:
            raise
        except Exception:  # which reading the files raises again, in a line of its own
            return []

    def text_files(self) -> list[str] | None:
        """Paths or addresses of the files of the data set if they are CSV or JSON, else None.

        Raises:
          DataError: the files need settings that only `datasets` supports.
        """
        from datasets import load_dataset_builder
        from datasets.packaged_modules.csv.csv import Csv
        from datasets.packaged_modules.json.json import Json

        with self.failing():
            builder = load_dataset_builder(self.name, self.config, revision=self.revision)
        files = (builder.config.data_files or {}).get(self.split)
        if not isinstance(builder, Csv | Json) or not files:
            return None
        for name, value in vars(type(builder.config)()).items():
            setting = getattr(builder.config, name)
            tabs = name in ("sep", "delimiter") and setting == "\t"
            if setting != value and name not in OF_NO_MATTER and not (tabs and _all_tabs(files)):
                raise DataError.of("data", self, f"files without {name}={setting}; {DIRECTLY}")
        return list(files)

    def failure(self, error: Exception) -> DataError:
        """Error line for an exception of the Hub's libraries; Interrupted if the network failed."""
        said = reason_of(error) if isinstance(error, pa.ArrowException) else str(error)
        reason = " ".join(said.split())[:300] or type(error).__name__
        kind, expected = DataError, "a data set that can be streamed"
        if may_pass(error):
            kind, expected = Interrupted, "to reach the Hugging Face Hub"
        return kind(
            f"data={self} (split {self.split}, revision {self.revision or 'newest'}): expected "
            f"{expected} ({reason})"
        )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Raise exceptions of the Hub's libraries as `failure`; a full disk is none of theirs."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # of many types
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            raise self.failure(error) from error

    def pinned(self) -> "HubSource":
        """The same data set at the commit that its revision names now."""
        if Path(self.name).exists() or re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            return self
        import huggingface_hub

        with self.failing():
            info = huggingface_hub.HfApi().dataset_info(self.name, revision=self.revision)
        return HubSource(self.name, self.config, self.split, info.sha)

    def identity(self) -> dict[str, Any]:
        """Identity of a pinned data set: its fields, and the digest of a local directory."""
        about, local = {**asdict(self), "source": str(self)}, Path(self.name)
        return {**identify(local), **about} if local.exists() else about


def fetch(source: HubSource, columns: Columns, directory: Path, pool: Pool) -> list[Path]:
    """Download the files of the data set into `directory`, except those that are there.

    Returns:
      The files, in order.
    Raises:
      DataError: the data set cannot be read, or lacks a column.
      Interrupted: the network failed.
    """
    directory.mkdir(exist_ok=True)
    if texts := source.text_files():
        copies = [(text, _copy_of(text, i, directory)) for i, text in enumerate(texts)]
        pool.map(partial(_copy, source=source), copies)
        return [file for _, file in copies]
    number = source.open().num_shards
    files = [directory / f"{shard:06d}-of-{number:06d}.parquet" for shard in range(number)]
    call = partial(_fetch, source=source, columns=columns)
    pool.map(call, list(enumerate(files)))
    return files


def _copy_of(text: str, number: int, directory: Path) -> Path:
    for there, here in TEXTS.items():
        if text.endswith(there):
            return directory / f"{number:06d}{here}"
    raise DataError.of("data", text, f"a file ending in {', '.join(TEXTS)}; {DIRECTLY}")


def _all_tabs(files: Sequence[str]) -> bool:
    return all(file.endswith((".tsv", ".tsv.gz")) for file in files)


def _copy(item: tuple[str, Path], *, source: HubSource, report: Callable[[int], None]) -> None:
    text, file = item
    _patiently(file, partial(_copy_text, text, file, source))


def _fetch(
    item: tuple[int, Path],
    *,
    source: HubSource,
    columns: Columns,
    report: Callable[[int], None],
) -> None:
    shard, file = item
    _patiently(file, partial(_fetch_shard, shard, file, source, columns, report))


def _patiently(file: Path, make: Callable[[], None]) -> None:
    """Make a file unless it exists. Try again after a pause if the network fails."""
    for pause in PAUSES_S:
        if file.exists():
            return
        try:
            return make()
        except Interrupted:
            sleep(pause)
    make()


def _copy_text(text: str, file: Path, source: HubSource) -> None:
    import huggingface_hub

    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with source.failing():
        opener: Any = open if Path(text).is_file() else huggingface_hub.HfFileSystem().open
        with opener(text, "rb") as stream, temporary.open("wb") as copy:
            shutil.copyfileobj(stream, copy)
    os.replace(temporary, file)


def _fetch_shard(
    shard: int, file: Path, source: HubSource, columns: Columns, report: Callable[[int], None]
) -> None:
    stream = source.open()
    stream = stream.shard(num_shards=stream.num_shards, index=shard).with_format("arrow")
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    writer = None
    with source.failing(), ExitStack() as stack:
        for table in stream.iter(batch_size=FETCH_ROWS):
            columns.check(paths(table.schema))
            table = table.select(columns.outer(table.column_names))
            if writer is None:
                made = pq.ParquetWriter(temporary, table.schema, compression="zstd")
                writer = stack.enter_context(made)
            writer.write_table(_like(writer.schema, table))
            report(len(table))
    if writer is None:  # a shard without rows
        pq.write_table(
            pa.table({name: pa.nulls(0, pa.string()) for name in columns.names}), temporary
        )
    os.replace(temporary, file)


def _like(schema: pa.Schema, table: pa.Table) -> pa.Table:
    """Cast a table to a schema.

    Raises:
      DataError: a column has texts in one and none in the other. Cast to numbers, the text 007
        would be 7, another user.
    """
    for name in table.column_names:
        kinds = schema.field(name).type, table.schema.field(name).type
        if len({is_string(getattr(kind, "value_type", kind)) for kind in kinds}) > 1:
            raise DataError(
                f"{name}: expected one type in all files, got {kinds[0]} and {kinds[1]}"
            )
    return table.cast(schema)


def split_sources(sources: Sequence[str | Path]) -> tuple[list[str], list[str | Path]]:
    """(sources of the Hub, other sources)."""
    of_hub = [str(source) for source in sources if str(source).startswith(PREFIX)]
    return of_hub, [source for source in sources if not str(source).startswith(PREFIX)]


KINDS = (ConnectionError, TimeoutError, socket.gaierror, ssl.SSLError)
LIBRARIES = {"httpx": "RequestError", "httpx2": "RequestError", "aiohttp": "ClientError"}


def may_pass(error: BaseException | None) -> bool:
    """True if an error, or a cause of it, is the network's or a server's: a retry may succeed."""
    while error is not None:
        status = _status(error)
        if status in (408, 429) or status >= 500:
            return True
        if not status and isinstance(error, (*KINDS, *_kinds_of_libraries())):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(error: BaseException) -> int:
    """HTTP status of the server's answer; 0 if there was none."""
    response = getattr(error, "response", error)
    status = getattr(response, "status_code", None) or getattr(response, "status", None)
    return status if isinstance(status, int) else 0


def _kinds_of_libraries() -> list[type[BaseException]]:
    """Network errors of the libraries that are imported; others cannot have raised any."""
    return [
        getattr(sys.modules[name], kind) for name, kind in LIBRARIES.items() if name in sys.modules
    ]
