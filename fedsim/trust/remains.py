"""Search files for what is left of some people's texts and ids.

Searched for are all strings of TEXT_BYTES bytes of their texts, in UTF-8 and as JSON spells them;
all runs of TOKEN_RUN tokens, as arrays of token ids hold them; and their ids. Left out is whatever
somebody else's texts in the same data have too, or has few different characters: it is no sign of
these people. The texts are those of the built data, as its tokenizer gives them back; a source may
have more of a text that was cut, or spell it differently.

A string is known by a 64-bit rolling hash with a random base. Files are read in blocks, compressed
and Parquet files also as what is in them. Memory does not grow with files, nor with the texts of
others; the texts searched for are taken MOST_TOKENS at a time.
"""

import json
import lzma
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedsim.data import Block, Dataset, Tokenizer, forgetting

TEXT_BYTES, TOKEN_RUN, ID_BYTES = 20, 8, 8
"""Bytes of a string of text, tokens of a run, and bytes of the shortest id that is searched for."""
DIFFERENT_BYTES, DIFFERENT_TOKENS = 6, 4
"""Fewest different bytes of a string, and tokens of a run: rows of dashes are in many files."""
MOST_TOKENS = 2**20
BLOCK = 2**18
TEXT, TOKENS, ID = "strings", "runs of tokens", "ids"
_BASE = secrets.randbits(64) | 1
_OF_BYTE = np.frombuffer(secrets.token_bytes(256 * 8), np.uint64)
_TOP = np.uint64(64)
STREAMS = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass
class Needles:
    """Strings of one width that are searched for."""

    kind: str
    """TEXT, TOKENS or ID."""
    width: int
    hashes: np.ndarray
    """uint64, sorted, without repeats."""
    table: np.ndarray = field(init=False)
    """True at the top bits of each hash, which rules out most others."""

    def __post_init__(self) -> None:
        bits = min(26, max(16, int(16 * len(self.hashes)).bit_length()))
        self._shift = _TOP - np.uint64(bits)
        self.table = np.zeros(2**bits, bool)
        self.table[self.hashes >> self._shift] = True

    def places(self, hashed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(indices in `hashed` of hashes that are searched for, index of each in `hashes`)."""
        if not len(self.hashes):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        at = np.flatnonzero(self.table[hashed >> self._shift])
        where = np.searchsorted(self.hashes, hashed[at])
        where[where == len(self.hashes)] = 0
        same = self.hashes[where] == hashed[at]
        return at[same], where[same]


def rolling(data: np.ndarray, widths: Iterable[int]) -> dict[int, np.ndarray]:
    """Hashes of all strings of some widths in bytes, uint64 [bytes - width + 1], by width."""
    return _joined(_OF_BYTE[data], widths, 1)


def runs(tokens: np.ndarray) -> np.ndarray:
    """Hashes of all runs of TOKEN_RUN tokens, as `rolling` has those of their bytes."""
    size = tokens.itemsize
    first = np.zeros(len(tokens), np.uint64)
    for byte in np.ascontiguousarray(tokens).view(np.uint8).reshape(-1, size).T:
        first = first * _shifted(1) + _OF_BYTE[byte]
    return _joined(first, [TOKEN_RUN], size).get(TOKEN_RUN, first[:0])


def _joined(first: np.ndarray, widths: Iterable[int], size: int) -> dict[int, np.ndarray]:
    """Hashes of strings of some numbers of units. Args: first: of each unit of `size` bytes."""
    widths = [width for width in widths if width <= len(first)]
    powers, units = {1: first}, 1
    while 2 * units <= max(widths, default=0):
        left = powers[units]
        powers[2 * units] = left[:-units] * _shifted(units * size) + left[units:]
        units *= 2
    found = {}
    for width in widths:
        number, done, total = len(first) - width + 1, 0, None
        for units in sorted(powers, reverse=True):
            if width & units:
                part = powers[units][done : done + number]
                total = part if total is None else total * _shifted(units * size) + part
                done += units
        found[width] = total
    return found


def _shifted(size: int) -> np.uint64:
    return np.uint64(pow(_BASE, size, 2**64))


Forms = list[tuple[int, np.ndarray]]
"""(width in bytes, hashes) of the same strings in several forms, such as types of token ids."""
Strings = tuple[str, Forms]
"""A kind, and strings of it."""


class _Own:
    """Strings of some people, in all of their forms, from which those of others are removed."""

    def __init__(self, kind: str, parts: Sequence[Forms]):
        self._widths = [width for width, _ in parts[0]]
        hashes = ([hashes for _, hashes in forms] for forms in parts)
        self._forms = [np.concatenate(each) for each in zip(*hashes, strict=True)]
        self._first = np.unique(self._forms[0], return_index=True)[1]
        self._needles = Needles(kind, self._widths[0], self._forms[0][self._first])
        self._gone = np.zeros(len(self._first), bool)

    def remove(self, hashes: np.ndarray) -> None:
        """Remove strings of others. Args: hashes: in the first form."""
        self._gone[self._needles.places(hashes)[1]] = True

    def left(self) -> Iterator[Needles]:
        """The strings that were not removed, in each form."""
        kept = self._first[~self._gone]
        for width, form in zip(self._widths, self._forms, strict=True):
            yield Needles(self._needles.kind, width, np.unique(form[kept]))


class Search:
    """The strings of some people's texts that nobody else's texts have."""

    def __init__(self, data: Dataset, people: Collection[str], theirs: Sequence[Block], ids: bool):
        """Collect the strings, and remove those of all others.

        Args:
          people: ids of the people.
          theirs: some of their rows.
          ids: also search for the ids.
        """
        self._tokenizer = Tokenizer.load(str(data.tokenizer_path))
        names = [each.encode() for each in people] if ids else []
        own: list[Strings] = [
            (ID, [(len(name), rolling(np.frombuffer(name, np.uint8), [len(name)])[len(name)])])
            for name in names
            if len(name) >= ID_BYTES
        ]
        own += [strings for block in theirs for strings in self._strings(block, own=True)]
        grouped: dict[tuple[str, int], list[Forms]] = {}
        for kind, forms in own:
            grouped.setdefault((kind, forms[0][0]), []).append(forms)
        found = {key: _Own(key[0], parts) for key, parts in grouped.items()}
        widths = [width for kind, width in found if kind == ID]
        for store in data.splits().values():
            for block in forgetting.blocks(store, people, theirs=False):
                for kind, [(width, hashes), *_] in self._strings(block, own=False, ids=widths):
                    if (kind, width) in found:
                        found[kind, width].remove(hashes)
        self.needles = [needles for each in found.values() for needles in each.left()]

    @property
    def counts(self) -> dict[str, int]:
        """Number of strings of each kind that are searched for."""
        kinds: dict[str, int] = {TEXT: 0, TOKENS: 0, ID: 0}
        for needles in self.needles:
            kinds[needles.kind] += len(needles.hashes)
        return kinds

    def _strings(self, block: Block, *, own: bool, ids: Sequence[int] = ()) -> Iterator[Strings]:
        """Yield the strings and runs of some rows.

        Args:
          own: in all forms, without strings that span rows or have few different characters.
          ids: widths of ids that may be in a text.
        """
        text = np.frombuffer(b"\0".join(self._texts(block)), np.uint8)
        for width, hashes in rolling(text, {TEXT_BYTES, *ids}).items():
            if width in ids:
                yield ID, [(width, hashes)]
            if width == TEXT_BYTES:
                kept = _varied(text, width, DIFFERENT_BYTES) if own else slice(None)
                yield TEXT, [(width, hashes[kept])]
        left = np.repeat(np.cumsum(block.lengths), block.lengths) - np.arange(len(block.values))
        kept = (left >= TOKEN_RUN)[: max(0, len(left) - TOKEN_RUN + 1)]
        arrays = [block.values]
        if own:
            kept &= _varied(block.values, TOKEN_RUN, DIFFERENT_TOKENS)
            wider = {"<u4", "<i8"} - {block.values.dtype.newbyteorder("<").str}
            arrays += [block.values.astype(form) for form in sorted(wider)]
            arrays += [] if block.flags is None else [block.marked]
        yield TOKENS, [(TOKEN_RUN * each.itemsize, runs(each)[kept]) for each in arrays]

    def _texts(self, block: Block) -> Iterator[bytes]:
        """Yield the text of each row, and how JSON spells it if that differs."""
        for row in np.split(block.values, np.cumsum(block.lengths)[:-1]):
            text = self._tokenizer.decode(row.tolist())
            forms = text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]
            yield from (form.encode(errors="replace") for form in dict.fromkeys(forms))

    def count(self, chunks: Iterable[bytes]) -> dict[str, int]:
        """Count the different strings of each kind in a stream of bytes; kinds without are left
        out."""
        widths = {needles.width for needles in self.needles}
        most = max(widths, default=0)
        hits = [np.zeros(len(needles.hashes), bool) for needles in self.needles]
        for data in _windows(chunks, most + 1):
            hashed = rolling(data, widths)
            for needles, hit in zip(self.needles, hits, strict=True):
                if needles.width in hashed:
                    at, where = needles.places(hashed[needles.width])
                    if needles.kind == ID:  # as a word, not inside another id
                        where = where[_is_word(data, at, needles.width)]
                    hit[where] = True
        found: dict[str, int] = {}
        for needles, hit in zip(self.needles, hits, strict=True):
            if number := int(hit.sum()):
                found[needles.kind] = found.get(needles.kind, 0) + number
        return found


def _varied(values: np.ndarray, width: int, least: int) -> np.ndarray:
    """True for each string of `width` values with at least so many different ones and no 0 byte
    between texts."""
    found = np.zeros(max(0, len(values) - width + 1), bool)
    for low in range(0, len(found), BLOCK):
        part = values[low : low + BLOCK + width - 1]
        ordered = np.sort(np.lib.stride_tricks.sliding_window_view(part, width), axis=1)
        different = 1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1)
        whole = ordered[:, 0] != 0 if values.dtype == np.uint8 else True
        found[low : low + len(different)] = (different >= least) & whole
    return found


def _is_word(data: np.ndarray, at: np.ndarray, width: int) -> np.ndarray:
    """True where no letter or digit stands before or after a string, and both are in `data`."""
    inside = (at > 0) & (at + width < len(data))
    before, after = data[at - 1], data[np.minimum(at + width, len(data) - 1)]
    return inside & ~_LETTERS[before] & ~_LETTERS[after]


_LETTERS = np.array([chr(byte).isalnum() or byte >= 128 for byte in range(256)])


def _windows(chunks: Iterable[bytes], overlap: int) -> Iterator[np.ndarray]:
    """Yield a stream, between zeros, in pieces that begin with the last bytes of the one before."""
    held = b"\0"
    for chunk in chunks:
        for low in range(0, len(chunk), BLOCK):
            held += chunk[low : low + BLOCK]
            if len(held) >= BLOCK:
                yield np.frombuffer(held, np.uint8)
                held = held[-overlap:]
    yield np.frombuffer(held + b"\0", np.uint8)


def contents(path: Path) -> Iterator[Iterator[bytes]]:
    """Yield the bytes of a file, then those inside it if it is compressed or Parquet.

    Raises:
      OSError: the file cannot be read.
    """
    yield _read(path)
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PAR1":
        yield _cells(path)
    if start == b"PK\x03\x04":
        yield _members(path)
    for magic, kind in STREAMS.items():
        if start.startswith(magic):
            yield _read(path, kind)


def _read(path: Path, compression: str | None = None) -> Iterator[bytes]:
    with path.open("rb") as file, pa.input_stream(file, compression) as stream:
        while chunk := stream.read(BLOCK):
            yield chunk


def _members(path: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                while chunk := file.read(BLOCK):
                    yield chunk
            yield b"\0"


def _cells(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file, pq.ParquetFile(file) as table:
        for batch in table.iter_batches(1024):
            for column in batch.columns:
                for leaf in _leaves(column):
                    yield leaf
                    yield b"\0"


def _leaves(column: Any) -> Iterator[bytes]:
    """Yield the texts, bytes and numbers of a column, whatever they are nested in."""
    kind = column.type
    if pa.types.is_struct(kind):
        for part in column.flatten():
            yield from _leaves(part)
    elif pa.types.is_map(kind):
        yield from _leaves(column.keys)
        yield from _leaves(column.items)
    elif pa.types.is_dictionary(kind):
        yield from _leaves(column.dictionary)
    elif pa.types.is_nested(kind):
        yield from _leaves(column.flatten())
    elif pa.types.is_integer(kind):
        yield np.ascontiguousarray(column.drop_null().to_numpy(zero_copy_only=False)).tobytes()
    elif pa.types.is_decimal(kind):
        return  # numbers, which no text is
    elif not pa.types.is_primitive(kind) and not pa.types.is_null(kind):
        cells = column.drop_null().cast(pa.large_binary()).to_pylist()
        yield b"\0".join(cells)


UNREADABLE = (
    *(OSError, EOFError, pa.ArrowException, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    UnicodeDecodeError,  # of names in a damaged Parquet file
    RuntimeError,  # of an encrypted member of a zip file, or an unknown compression
)
"""Errors of files that are damaged, or that only their owner can read."""


@dataclass
class Remains:
    """What a search found."""

    files: int = 0
    sought: dict[str, int] = field(default_factory=dict)
    """Number of strings of each kind that were searched for."""
    found: dict[Path, dict[str, int]] = field(default_factory=dict)
    """Number of strings of each kind in each file that has any."""
    unread: list[Path] = field(default_factory=list)


def search(
    data: Dataset, people: Collection[str], roots: Iterable[Path], skipped: Collection[Path] = ()
) -> Remains:
    """Search all files in some places for the texts and ids of some people.

    Args:
      data: the data set with their texts.
      people: their ids.
      roots: files and directories; links are not followed.
      skipped: directories that are left out.
    """
    remains = Remains()
    paths = list(_files(roots, skipped, remains.unread))
    remains.files = len(paths)
    for number, theirs in enumerate(_passes(data, people)):
        one = Search(data, people, theirs, ids=number == 0)
        for kind, count in one.counts.items():
            remains.sought[kind] = remains.sought.get(kind, 0) + count
        for path in paths:
            counts: list[dict[str, int]] = [{}]
            try:
                counts.extend(one.count(chunks) for chunks in contents(path))
            except UNREADABLE:
                if path not in remains.unread:  # what was read before counts
                    remains.unread.append(path)
            for kind in (TEXT, TOKENS, ID):
                if most := max(count.get(kind, 0) for count in counts):
                    there = remains.found.setdefault(path, {})
                    there[kind] = there.get(kind, 0) + most
    return remains


def _passes(data: Dataset, people: Collection[str]) -> Iterator[list[Block]]:
    """Yield the rows of the people, about MOST_TOKENS at a time; at least one list."""
    held: list[Block] = []
    for store in data.splits().values():
        for block in forgetting.blocks(store, people, theirs=True):
            held.append(block)
            if sum(len(each.values) for each in held) >= MOST_TOKENS:
                yield held
                held = []
    yield held


def _files(roots: Iterable[Path], skipped: Collection[Path], unread: list[Path]) -> Iterator[Path]:
    """Yield each file below some places once. Directories that cannot be read go to `unread`."""

    def failed(error: OSError) -> None:
        unread.append(Path(error.filename))

    seen: set[tuple[int, int]] = set()
    for root in roots:
        if root in skipped:
            continue
        below = (
            os.walk(root, onerror=failed)
            if root.is_dir()
            else [(str(root.parent), [], [root.name])]
        )
        for folder, folders, names in below:
            folders[:] = sorted(each for each in folders if Path(folder, each) not in skipped)
            for path in sorted(Path(folder, name) for name in names):
                try:
                    status = path.lstat()
                except OSError:
                    continue
                key = status.st_dev, status.st_ino
                if stat.S_ISREG(status.st_mode) and key not in seen:
                    seen.add(key)
                    yield path
