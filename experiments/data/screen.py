"""Pre-training text without the fine-tuning text: what made C4-- of C4 (Charles et al. 2024).

Near duplicates of other sources' texts are left out first, then rows of given hosts and rows
whose URL another source has. `prepare` does so part by part, into Parquet files, and has fedsim
build what is left.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.data import wordpiece
from experiments.data.neardup import TEXTS_AT_ONCE, NearDuplicates, build_index
from experiments.data.urls import hosts_above, normal_url
from fedsim.data import Dataset, build, expected_of
from fedsim.data.building.build import BuildSettings, Pool
from fedsim.data.building.columns import Columns, is_blank, normalise, text_of
from fedsim.data.building.sources import (
    HUB,
    HubSource,
    Part,
    complaints,
    cut,
    find_files,
    hub_source,
    raw,
)
from fedsim.engine import version
from fedsim.errors import MissingColumn
from fedsim.files import read_json, sha256_of, write_json

SCREEN = "screen.json"
VERSIONS = ("fedsim", "datasketch", "numpy", "pyarrow", "rapidfuzz", "xxhash")


@dataclass(frozen=True)
class Screen:
    """What is left out of a source."""

    against: tuple[str, ...] = ()
    """Sources whose texts' near duplicates go, and whose URLs. A source whose text is in another
    column than the screened one's is written SOURCE#COLUMN."""
    screen_url_column: str | None = None
    """The column with a row's URL, in the source and in `against` (where it may be missing)."""
    without_domains: tuple[str, ...] = ()
    """Hosts in lower case whose rows go, and those of all hosts below them: of blog.a.org with
    a.org."""

    def pinned(self) -> list["Against"]:
        """The sources in `against` as they are now: files, and commits of the Hub's.

        Raises: DataError: one is not there. Interrupted: the Hub is out of reach.
        """
        found = []
        for named in self.against:
            source = named.partition("#")[0]
            if source.startswith(HUB):
                of_hub = HubSource.parse(source).pinned()
                found.append(Against(named, of_hub=of_hub))
            else:
                found.append(Against(named, files=tuple(find_files(source))))
        return found

    def with_urls(self, columns: Columns) -> "WithUrl":
        """`columns`, and the one with URLs, if there is one."""
        return WithUrl(**vars(columns), screen_url=self.screen_url_column)


@dataclass(frozen=True)
class WithUrl(Columns):
    """Columns, and the one with the URLs by which rows are left out."""

    screen_url: str | None = None

    @property
    def names(self) -> list[str]:
        url = () if self.screen_url is None else (self.screen_url,)
        return list(dict.fromkeys((*super().names, *url)))

    def check(self, found: Sequence[str]) -> None:
        if self.screen_url is not None and self.screen_url not in found:
            expected = expected_of(found)
            raise MissingColumn(f"screen_url_column={self.screen_url}: {expected}")
        super().check(found)


@dataclass(frozen=True)
class Against:
    """One source that is screened against."""

    named: str
    """As in `Screen.against`."""
    files: tuple[Path, ...] = ()
    of_hub: HubSource | None = None
    """Instead of files, until it is fetched."""

    def columns(self, screened: Columns) -> Columns:
        """Its text, in a column of that name unless it says otherwise; whose does not matter."""
        column = self.named.partition("#")[2]
        return Columns("", (column,) if column else screened.text)

    def fetched(self) -> "Against":
        """The same with files."""
        return self if self.of_hub is None else replace(self, files=tuple(self.of_hub.files()))

    def identity(self) -> dict[str, Any]:
        """What its texts are: the bytes of its files, or its commit."""
        if self.of_hub is not None:
            return {"against": self.named, **asdict(self.of_hub)}
        return {"against": self.named, "files": [identify(file) for file in self.files]}


def identify(file: Path) -> dict[str, Any]:
    """Name, bytes and sha256 of a file."""
    return {"name": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file)}


def counts_of(dataset: Dataset) -> dict[str, int]:
    """The counts of the screen that a data set was built with; empty without one."""
    assert dataset.path is not None, "of a directory"
    file = dataset.path / SCREEN
    return read_json(file)["counts"] if file.exists() else {}


def prepare(
    sources: Sequence[str | Path] | str | Path,
    out: str | Path,
    *,
    screen: Screen | None = None,
    num_workers: int | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Dataset:
    """`build` of what a screen leaves of the sources; the screen and its counts, of the paper's
    Table 2, are in screen.json beside its splits. Without a screen it is `build` alone.

    Args: options: of `build`; tokenizer may be wordpiece:SIZE, which is learnt from what a screen
      leaves.
    Raises: DataError: bad input, and whatever `build` raises.
    """
    own: dict[str, Any] = {"num_workers": num_workers, "progress": progress}
    if screen is None:
        return build(sources, out, **own, **options)
    sources = [sources] if isinstance(sources, str | Path) else list(sources)
    text = options.get("text_column", "text")
    columns = Columns(options.get("user_column", "user_id"), (text,), options.get("order_column"))
    out = Path(out).absolute()
    with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as made:
        directory = Path(made)
        with Pool(num_workers, progress) as pool:
            files, about = _screen(sources, directory, screen, columns, pool)
        spec = str(options.get("tokenizer", ""))
        if spec.startswith(wordpiece.PREFIX):
            rows = about["counts"]["deduplicated_and_url_filtered"]
            given = files, columns, options.get("eval_users", BuildSettings.eval_users), rows
            size, place = int(spec.removeprefix(wordpiece.PREFIX)), directory / "tokenizer.json"
            learnt = wordpiece.learn(lambda: wordpiece.texts_of(*given), size, place)
            options |= {"tokenizer": learnt, "tokenizer_is_public": True}
        built = build(files, out, **own, **options)
        write_json(out / SCREEN, about)
        return built


def _screen(
    sources: Sequence[str | Path],
    directory: Path,
    screen: Screen,
    columns: Columns,
    pool: Pool,
) -> tuple[list[Path], dict[str, Any]]:
    """The files with what is left of the sources, and what there is to say of how they came."""
    source = hub_source(sources)
    files = [] if source else find_files(sources)
    against = screen.pinned()
    about = {**asdict(screen), "columns": asdict(columns)}
    about["source"] = asdict(source) if source else [identify(file) for file in files]
    about["sources"] = [one.identity() for one in against]
    about["versions"] = {name: version(name) for name in VERSIONS}
    wanted = screen.with_urls(columns)
    if source:
        files = source.files()
    pool.grow(sum(path.stat().st_size for path in files))
    parts = [part for file in files for part in cut(file, wanted)]
    against = [one.fetched() for one in against]
    pool.grow(sum(path.stat().st_size for one in against for path in one.files))
    left, counts = screen_parts(parts, columns, screen, against, directory / "rows", pool)
    return left, {**about, "counts": counts}


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
) -> tuple[list[Path], dict[str, int]]:
    """Writes the rows that stay, as Parquet files, in order, and counts what stays.

    Returns: the files, and the counts of the paper's Table 2: examples, deduplicated,
      deduplicated_and_url_filtered.
    Raises: DataError: a source cannot be read, or lacks a column.
    """
    directory.mkdir(exist_ok=True)
    known = _read_known(screen, against, columns, directory, pool)
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
) -> _Known:
    pieces, urls = [], set()
    for source in against:
        wanted = source.columns(columns)
        parts = [part for file in source.files for part in cut(file, wanted)]
        pieces += [(part, wanted) for part in parts]
        if screen.screen_url_column is not None:
            for part in parts:
                urls.update(_urls_of(part, screen.screen_url_column))
    texts = build_index(pieces, directory / "index", pool) if pieces else None
    return _Known(texts, frozenset(urls), frozenset(screen.without_domains))


def _urls_of(part: Part, column: str) -> Iterable[str]:
    try:
        for first_row, batch in raw(part, WithUrl("", (), screen_url=column)):
            with complaints(part.file):
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
) -> dict[str, Any]:
    """Counts of one part (rows, not near duplicates, of them not of a known URL or domain), and the
    names of the files in which its rows are."""
    number, part = item
    url, wanted = screen.screen_url_column, screen.with_urls(columns)
    counts, kept = np.zeros(3, np.int64), _Files(directory, f"{number:06d}")
    for first_row, batch in raw(part, wanted):
        for start in range(0, len(batch), TEXTS_AT_ONCE):
            piece = batch.slice(start, TEXTS_AT_ONCE)
            with complaints(part.file):
                new = ~_duplicates(piece, wanted, first_row + start, known.texts)
                stays = new & ~_known_urls(piece, url, first_row + start, known)
            counts += len(piece), new.sum(), stays.sum()
            kept.write(piece.filter(pa.array(stays)))
    if not kept.names:
        nothing = {name: pa.nulls(0, pa.string()) for name in wanted.names}
        kept.write(pa.RecordBatch.from_pydict(nothing))
    kept.close()
    return {"counts": counts.tolist(), "files": kept.names}


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
