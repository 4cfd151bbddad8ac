"""Sources of a data set: files, folders and globs, and data sets of the Hugging Face Hub.

Rows come in the order of a file, in checked batches. Several processes can read a Parquet file; any
other is read by one. Errors name the file, the row and the reason.

Files of the Hub are downloaded into the cache of its library, and read as local ones are. FILES of
`hf:NAME:FILES` is a pattern of their paths; without it, those with the word train are read.
"""

import fnmatch
import glob
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.config import BuildConfig
from fedsim.data.building.columns import Columns, chats_as_json, normalise, plain
from fedsim.data.building.text_files import PACKED, TextFile
from fedsim.errors import DataError, Interrupted, may_pass, printable
from fedsim.files import DISK_FULL, TABLES, expand_home, near

READ_ROWS, READ_BYTES = 65_536, 64 * 2**20  # of a batch, at most
PART_ROWS, PART_BYTES = 2**20, 128 * 2**20  # of a part, about
TEXTS = ("json", "jsonl", "ndjson", "csv", "tsv")
SUFFIXES = (".parquet", *(f".{kind}{z}" for kind in TEXTS for z in ("", *PACKED)))
DEFAULTS = BuildConfig()
READING = pa.ArrowException, OSError, EOFError, ValueError, OverflowError, RecursionError
"""Errors of libraries that read a damaged file."""
HUB = "hf:"
SHOWN = 20  # files in an error
HUB_FORM = re.compile(r"hf:([^@:]+)(?:@([^@:]+))?(?::(.+))?")
TRAIN = re.compile("(?<![a-z])train(ing)?(?![a-z])")


@dataclass(frozen=True)
class Part:
    """A source, or some row groups of a Parquet file."""

    file: Path
    size: int
    """Bytes, about."""
    start: int = 0
    end: int = 0
    """End of the row groups, exclusive."""
    first_row: int = 0
    """Number of rows of the file before the part."""


def kind_of(file: Path) -> str:
    """Format of a source: parquet, json, jsonl, csv or tsv; another suffix is no format."""
    name = file.name.removesuffix(file.suffix) if file.suffix in PACKED else file.name
    kind = name.rpartition(".")[2].lower()
    return "jsonl" if kind == "ndjson" else kind


def is_known(file: Path) -> bool:
    """True if a file's name says that it can be read. Capital letters are fine, but for .GZ."""
    return file.name.lower().endswith(SUFFIXES) and not file.name.endswith((".GZ", ".ZST"))


def find_files(sources: Sequence[str | Path] | str | Path) -> list[Path]:
    """Find the files of paths and globs, in the given order; files of a glob are sorted.

    Each file is there once, whatever paths lead to it. A directory stands for its files that can be
    read. Raises: DataError: there is no such file, or its extension is unknown.
    """
    files: dict[Path, Path] = {}
    for source in [sources] if isinstance(sources, str | Path) else sources:
        source = expand_home("data", source)
        here = Path(source)
        exists = here.exists() and source != ""  # such as an unset variable of the shell
        matched = [here] if exists else map(Path, sorted(glob.glob(source, recursive=True)))
        found: list[Path] = []
        for path in matched:
            found += files_in(path) if path.is_dir() else [path]
        if not found:
            expected = "a file, glob or directory (of `fedsim data build`, say) that exists"
            expected += near(here)
            if exists:
                expected = f"files in it that end in {', '.join(SUFFIXES)} (JSON: '{source}/*.json'"
                expected += "; what `datasets` saved: to_parquet writes such a file)"
            raise DataError.of("data", source, expected)
        for file in found:
            files.setdefault(file.resolve(), file)
    for file in files.values():
        if not is_known(file):
            remedy = "unpack archives, and save other files as Parquet, .csv or .tsv"
            expected = f"a file ending in {', '.join(SUFFIXES)}; {remedy}"
            raise DataError.of("data", file, expected)
    if not files:
        raise DataError.of("data", "[]", "at least one file")
    return list(files.values())


def files_in(directory: Path) -> list[Path]:
    """Files of a directory that can be read, by name.

    Hidden files are skipped, such as those that macOS puts beside others, and .json files, which
    also hold settings, those of built data sets among them.
    """
    files = sorted(path for path in directory.iterdir() if path.is_file() and is_known(path))
    return [path for path in files if path.name[0] != "." and kind_of(path) != "json"]


@dataclass(frozen=True)
class HubSource:
    """Files of a data set of the Hugging Face Hub."""

    name: str
    revision: str | None
    pattern: str | None
    """Pattern of the paths of the files; None: those with the word train."""

    @classmethod
    def parse(cls, source: str) -> "HubSource":
        """Parse hf:NAME[@REVISION][:FILES]. Raises: DataError: it is another text."""
        found = HUB_FORM.fullmatch(source)
        if found is None:
            raise DataError.of("data", source, "hf:NAME, hf:NAME@REVISION or hf:NAME:FILES")
        return cls(*found.groups())

    def __str__(self) -> str:
        return f"{HUB}{self.name}" + (f":{self.pattern}" if self.pattern else "")

    def pinned(self) -> "HubSource":
        """The same data set at the commit that its revision names now."""
        if re.fullmatch("[0-9a-f]{40}", self.revision or ""):  # which needs no network
            return self
        return replace(self, revision=self._info().sha)

    def files(self) -> list[Path]:
        """The files, by name, downloaded unless they are in the cache.

        Raises: DataError: there are no such files. Interrupted: the Hub cannot be reached.
        """
        names = sorted(each.rfilename for each in self._info().siblings or ())
        names = [name for name in names if is_known(Path(name))]
        if self.pattern is not None:
            chosen = fnmatch.filter(names, self.pattern)
        else:
            chosen = [name for name in names if TRAIN.search(name.lower())]
        forms = {(x.rpartition("/")[0].partition("/")[0], kind_of(Path(x))) for x in chosen}
        if not chosen or (len(forms) > 1 and self.pattern is None):  # often the same rows twice
            expected = f"{HUB}{self.name}:FILES with a pattern of its files: "
            raise DataError.of("data", self, expected + (", ".join(names[:SHOWN]) or "none"))
        wanted = {"allow_patterns": [glob.escape(name) for name in chosen]}
        wanted |= {"repo_type": "dataset", "revision": self.revision}
        root = Path(self._of_hub(lambda hub: hub.snapshot_download(self.name, **wanted)))
        return [root / name for name in chosen]

    def _info(self) -> Any:
        return self._of_hub(lambda hub: hub.HfApi().dataset_info(self.name, revision=self.revision))

    def _of_hub(self, call: Callable[[Any], Any]) -> Any:
        """Call the Hub's library. Raises: DataError, or Interrupted if the network failed."""
        import huggingface_hub

        try:
            return call(huggingface_hub)
        except Exception as error:  # of many types
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            kind, expected = DataError, "a data set that can be downloaded"
            if may_pass(error):
                kind, expected = Interrupted, "to reach the Hugging Face Hub"
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            where = f"revision {self.revision or 'newest'}"
            raise kind(f"data={self} ({where}): expected {expected} ({reason})") from error


def hub_source(sources: Sequence[str | Path]) -> HubSource | None:
    """The pinned data set of the Hub that is the one source; None if the sources are files.

    Raises: DataError: there are several sources, some of the Hub.
    """
    of_hub = [str(source) for source in sources if str(source).startswith(HUB)]
    if of_hub and len(sources) > 1:
        raise DataError.of("data", sources, "files, or one hf: data set")
    return HubSource.parse(of_hub[0]).pinned() if of_hub else None


def names_in(files: Iterable[Path], settings: BuildConfig = DEFAULTS) -> list[str]:
    """Names of the columns of the first file that has any. Raises: DataError: one is damaged."""
    for file in files:
        with complaints(file):
            is_parquet = kind_of(file) == "parquet"
            opened = pq.read_schema(file) if is_parquet else TextFile(file, kind_of(file), settings)
            if opened.names:
                return opened.names
    return []


def cut(file: Path, columns: Columns) -> list[Part]:
    """Cut a source into parts, in order. Raises: DataError: it is damaged, or lacks a column."""
    if kind_of(file) != "parquet":
        return [Part(file, file.stat().st_size)]
    parts, start, row, rows, size = [], 0, 0, 0, 0
    with complaints(file), pq.ParquetFile(file) as parquet:
        columns.check(parquet.schema_arrow.names)
        groups = [parquet.metadata.row_group(i) for i in range(parquet.metadata.num_row_groups)]
        for end, group in enumerate(groups, 1):
            rows, size = rows + group.num_rows, size + group.total_byte_size
            if rows >= PART_ROWS or size >= PART_BYTES or end == len(groups):
                parts.append(Part(file, size, start, end, row))
                start, row, rows, size = end, row + rows, 0, 0
    return parts or [Part(file, 0)]


def read(
    part: Part, columns: Columns, settings: BuildConfig = DEFAULTS
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a part in order: (number of rows of the file before the batch, batch).

    Batches have the columns user_id, text and perhaps order; see `columns.normalise`.

    Args: settings: quoting of text files.
    Raises: DataError: names the file and the reason.
    """
    for first_row, batch in raw(part, columns, settings):
        with complaints(part.file):
            batch = normalise(batch, columns, first_row)
        yield first_row, batch


def raw(
    part: Part, columns: Columns, settings: BuildConfig = DEFAULTS
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a part as `read` does, with the columns of the file; chats as JSON."""
    kind, row = kind_of(part.file), part.first_row
    with complaints(part.file):
        if kind == "parquet":
            batches = _parquet_batches(part, columns)
        else:
            batches = TextFile(part.file, kind, settings).batches(columns)
        for batch in batches:
            if columns.form and not kind.startswith("json"):
                batch = chats_as_json(batch, columns)
            found = {name: plain(batch[name], name) for name in batch.schema.names}
            yield row, pa.RecordBatch.from_pydict(found)
            row += len(batch)


def _parquet_batches(part: Part, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Yield the rows of row groups, in batches that fit in memory."""
    with pq.ParquetFile(part.file) as parquet:
        columns.check(parquet.schema_arrow.names)
        names = columns.in_file(parquet.schema_arrow.names)
        groups = list(range(part.start, part.end))
        rows = sum(parquet.metadata.row_group(group).num_rows for group in groups)
        fitting = max(1, min(READ_ROWS, READ_BYTES * rows // max(part.size, 1)))
        for batch in parquet.iter_batches(fitting, row_groups=groups, columns=names):
            yield batch.select(names)


def is_table(source: str | Path) -> bool:
    """True for the file of a table from memory."""
    path = Path(source)
    return path.parent.name == TABLES and path.suffix == ".parquet"


def in_words(source: Path) -> str:
    """A source as an error names it: a file by its path."""
    return "the table" if is_table(source) else str(source)


@contextmanager
def complaints(source: Path) -> Iterator[None]:
    """Turn errors of readers into one line that names the file, without the values they quote."""
    try:
        yield
    except DataError as error:
        named = type(error)(printable(f"{error} (in {in_words(source)})"))
        named.field, named.value = error.field, error.value
        raise named from None
    except READING as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        what = f"data={source}: expected a readable {kind_of(source)} file ({reason})"
        raise DataError(printable(what), field="data") from None
