"""Pre-training text without the fine-tuning text: what made C4-- of C4 (Charles et al. 2024).

Near duplicates of other sources' texts are left out first, then rows of given hosts and rows
whose URL another source has. Works part by part, before a build looks at what is left.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data.building import hub
from fedsim.data.building.columns import Columns, is_blank, normalise, text_of
from fedsim.data.building.domains import host_name, hosts_above, normal_url
from fedsim.data.building.neardup import TEXTS_AT_ONCE, NearDuplicates, build_index, refuse_tokens
from fedsim.data.building.processes import Pool
from fedsim.data.building.readers import Part, complaints, raw
from fedsim.data.building.sources import examine, find_files, identify
from fedsim.data.building.text_format import Form
from fedsim.errors import DataError, MissingColumn
from fedsim.files import write_json


@dataclass(frozen=True)
class Screen:
    """What is left out of a source."""

    against: tuple[str, ...] = ()
    """Sources whose texts' near duplicates go, and whose URLs. A source whose text is in another
    column than the screened one's is written SOURCE#COLUMN."""
    screen_url_column: str | None = None
    """The column with a row's URL, in the source and in `against` (where it may be missing)."""
    without_domains: tuple[str, ...] = ()
    """Hosts whose rows go, and those of all hosts below them: of blog.a.org, too, if a.org goes."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left out."""
        return not (self.against or self.without_domains)

    def pinned(self) -> list["Against"]:
        """The sources in `against` as they are now: files, and commits of the Hub's.

        Raises: DataError: one is not there. Interrupted: the Hub is out of reach.
        """
        found = []
        for named in self.against:
            source = named.partition("#")[0]
            if source.startswith(hub.PREFIX):
                of_hub = hub.HubSource.parse(source, None, None).pinned()
                found.append(Against(named, of_hub=of_hub))
            else:
                found.append(Against(named, files=tuple(find_files(source))))
        return found

    def with_urls(self, columns: Columns) -> Columns:
        """`columns`, and the one with URLs where rows may be left out by it."""
        url = None if self.is_idle else self.screen_url_column
        return replace(columns, extra=(url,) if url else ())

    def check(self) -> None:
        """Raises: DataError: domains are given, but no column with URLs, or are none."""
        for domain in self.without_domains:
            if host_name(domain) is None:
                raise DataError(
                    f"without_domains={domain}: expected a name of a host, such as example.com"
                )
        if self.without_domains and self.screen_url_column is None:
            shown = ",".join(self.without_domains)
            raise DataError(f"without_domains={shown}: expected a screen_url_column")


@dataclass(frozen=True)
class Against:
    """One source that is screened against."""

    named: str
    """As in `Screen.against`."""
    files: tuple[Path, ...] = ()
    of_hub: hub.HubSource | None = None
    """Instead of files, until it is fetched."""

    def columns(self, screened: Columns) -> Columns:
        """Its text, in a column of that name unless it says otherwise; whose does not matter."""
        column = self.named.partition("#")[2]
        return Columns(user=(), text=(column,) if column else screened.text)

    def identity(self) -> dict[str, Any]:
        """What its texts are: the bytes of its files, or its commit."""
        if self.of_hub is not None:
            return {"against": self.named, **self.of_hub.identity()}
        return {"against": self.named, "files": [identify(file) for file in self.files]}


def collect(
    against: Sequence[Against], screen: Screen, columns: Columns, directory: Path, pool: Pool
) -> list[Against]:
    """The same with files, those of the Hub fetched into `directory`.

    Raises: DataError: one cannot be read.
    """
    found = []
    for number, one in enumerate(against):
        if one.of_hub is not None:
            wanted, there = one.columns(columns), directory / f"against-{number}"
            try:
                files = hub.fetch(one.of_hub, screen.with_urls(wanted), there, pool)
            except MissingColumn:
                files = hub.fetch(one.of_hub, wanted, there, pool)
            one = replace(one, files=tuple(files))
        found.append(one)
    return found


@dataclass(frozen=True)
class _Known:
    """What the other sources hold."""

    texts: NearDuplicates | None
    urls: frozenset[str]
    domains: frozenset[str]


def screen_parts(
    parts: Sequence[Part],
    columns: Columns,
    screen: Screen,
    against: Sequence[Against],
    directory: Path,
    pool: Pool,
    form: Form,
) -> tuple[list[Path], dict[str, int]]:
    """Writes the rows that stay, as Parquet files, in order, and counts what stays.

    Args: form: of CSV files, of the sources and of those that are held against them.
    Returns: the files, and the counts of the paper's Table 2: examples, deduplicated,
      deduplicated_and_url_filtered.
    Raises: DataError: a source cannot be read, or lacks a column.
    """
    directory.mkdir(exist_ok=True)
    known = _read_known(screen, against, columns, directory, pool, form)
    call = partial(_screen_part, columns=columns, screen=screen, known=known, directory=directory)
    records = pool.map(call, list(enumerate(parts)))
    counts = np.array([record["counts"] for record in records]).reshape(-1, 3).sum(axis=0).tolist()
    names = ("examples", "deduplicated", "deduplicated_and_url_filtered")
    files = [directory / name for record in records for name in record["files"]]
    return files, dict(zip(names, counts, strict=True))


def _read_known(
    screen: Screen,
    against: Sequence[Against],
    columns: Columns,
    directory: Path,
    pool: Pool,
    form: Form,
) -> _Known:
    pieces, urls = [], set()
    for source in against:
        wanted = source.columns(columns)
        parts = examine(source.files, wanted, pool, None, form).parts
        pieces += [(part, wanted) for part in parts]
        if screen.screen_url_column is not None:
            for part in parts:
                urls.update(_urls_of(part, screen.screen_url_column))
    domains = frozenset(filter(None, map(host_name, screen.without_domains)))
    texts = build_index(pieces, directory / "index", pool) if pieces else None
    return _Known(texts, frozenset(urls), domains)


def _urls_of(part: Part, column: str) -> Iterable[str]:
    try:
        for first_row, batch in raw(part, Columns(user=(), text=(), extra=(column,))):
            with complaints(part):
                urls = text_of(batch[column], f"screen_url_column={column}", first_row)
            yield from filter(None, map(normal_url, urls.to_pylist()))
    except MissingColumn:
        return


def _screen_part(
    item: tuple[int, Part],
    *,
    columns: Columns,
    screen: Screen,
    known: _Known,
    directory: Path,
    report: Callable[[int], None],
) -> dict[str, Any]:
    """Counts of one part (rows, not near duplicates, of them not of a known URL or domain), and the
    names of the files in which its rows are."""
    number, part = item
    record_file = directory / f"{number:06d}.json"
    if record_file.exists():
        return json.loads(record_file.read_text())
    url, wanted = screen.screen_url_column, screen.with_urls(columns)
    counts, kept = np.zeros(3, np.int64), _Files(directory, f"{number:06d}")
    for first_row, batch in raw(part, wanted):
        for start in range(0, len(batch), TEXTS_AT_ONCE):
            piece = batch.slice(start, TEXTS_AT_ONCE)
            with complaints(part):
                new = ~_duplicates(piece, wanted, first_row + start, known.texts)
                stays = new & ~_known_urls(piece, url, first_row + start, known)
            counts += len(piece), new.sum(), stays.sum()
            kept.write(piece.filter(pa.array(stays)))
            report(len(piece))
    if not kept.names:
        nothing = {name: pa.nulls(0, pa.string()) for name in wanted.names}
        kept.write(pa.RecordBatch.from_pydict(nothing))
    kept.close()
    record = {"counts": counts.tolist(), "files": kept.names}
    write_json(record_file, record)
    return record


class _Files:
    """Parquet files that have batches as they were read.

    A file is of one schema, and a column that begins with numbers may go on with texts: cast to
    numbers, 007 would be 7, another user. So each change of the schema begins another file.
    """

    def __init__(self, directory: Path, prefix: str):
        self.names: list[str] = []
        self._directory, self._prefix = directory, prefix
        self._writer: pq.ParquetWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if self._writer is None or batch.schema != self._writer.schema:
            self.close()
            self.names.append(f"{self._prefix}-{len(self.names):06d}.parquet")
            file = self._directory / self.names[-1]
            self._writer = pq.ParquetWriter(file, batch.schema, compression="zstd")
        self._writer.write_batch(batch)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _duplicates(
    batch: pa.RecordBatch, columns: Columns, first_row: int, known: NearDuplicates | None
) -> np.ndarray:
    found = np.zeros(len(batch), bool)
    if known is None:
        return found
    texts = normalise(batch, replace(columns, order=None), first_row)["text"]
    refuse_tokens(texts, columns)
    rows = np.flatnonzero(~is_blank(texts))
    found[rows] = known.found_in(texts.take(pa.array(rows)).to_pylist())
    return found


def _known_urls(
    batch: pa.RecordBatch, column: str | None, first_row: int, known: _Known
) -> np.ndarray:
    found = np.zeros(len(batch), bool)
    if column is not None:
        urls = text_of(batch[column], f"screen_url_column={column}", first_row)
        for row, url in enumerate(urls.to_pylist()):
            if url:
                known_host = not known.domains.isdisjoint(hosts_above(url))
                found[row] = known_host or normal_url(url) in known.urls
    return found
