"""Near duplicates of a set of texts, as NearDup of Lee et al. 2022 finds them.

Texts are split at white space into words, sets of 5-grams are compared by MinHash in bands, and a
candidate is a near duplicate if the Jaccard index of the sets is at least 0.8 and the edit
similarity of the words above 0.8. The paper has 450 bands of 20 values; 32 of 8 propose no fewer
pairs above 0.8 (0.997 of them, against 0.995) at a twentieth of the work, and every candidate is
verified anyway. Signatures are datasketch's; the index is sorted arrays on disk, so that it is
shared by processes and need not fit in memory.
"""

import os
from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash
from datasketch import MinHash
from rapidfuzz.distance import Levenshtein

from fedsim.data.building.build import Pool
from fedsim.data.building.columns import Columns, is_blank
from fedsim.data.building.sources import Part, read

NGRAM = 5
BANDS, BAND_ROWS = 32, 8
SIMILAR = 0.8
TEXTS_AT_ONCE = 4_096


def build_index(
    parts: Sequence[tuple[Part, Columns]], directory: Path, pool: Pool
) -> "NearDuplicates":
    """Indexes all texts of `parts`.

    Raises: DataError: a part cannot be read.
    """
    directory.mkdir(exist_ok=True)
    call = partial(_index_part, directory=directory)
    pool.map(call, list(enumerate(parts)))
    index = NearDuplicates(directory)
    index.sort(len(parts))
    return index


def _index_part(item: tuple[int, tuple[Part, Columns]], *, directory: Path) -> None:
    number, (part, columns) = item
    file = directory / f"{number:06d}.texts"
    kept, keys, seen = [], [], set()
    for _, batch in read(part, columns):
        texts = batch["text"].filter(pa.array(~is_blank(batch["text"]))).to_pylist()
        digests = [xxhash.xxh3_128_digest(text.encode()) for text in texts]
        new = []
        for text, digest in zip(texts, digests, strict=True):
            if digest not in seen:  # one of equal texts is enough
                seen.add(digest)
                new.append(text)
        keys.append(band_keys(new))
        kept.append(pa.array(new, pa.large_string()))
    table = pa.table({"key": np.concatenate([band_keys([]), *keys]).ravel()})
    write_table(directory / f"{number:06d}.keys", table)
    texts = pa.concat_arrays(kept) if kept else pa.array([], pa.large_string())
    write_table(file, pa.table({"text": texts}))


def write_table(path: Path, table: pa.Table) -> None:
    """An Arrow file that can be mapped; whole or absent."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    os.replace(temporary, path)


def read_table(path: Path) -> pa.Table:
    """What `write_table` wrote, mapped."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


class NearDuplicates:
    """An index of texts in a directory, that `build_index` made. Pickles as its path."""

    def __init__(self, directory: Path):
        self.directory = directory

    def sort(self, num_parts: int) -> None:
        """Writes the index of each band: keys in order, and whose they are."""
        tables = [read_table(self.directory / f"{number:06d}.keys") for number in range(num_parts)]
        keys = [table["key"].combine_chunks().to_numpy() for table in tables]
        parts = [part.reshape(-1, BANDS) for part in keys]
        total = sum(len(part) for part in parts)
        temporary = self.directory / f"bands.{os.getpid()}.tmp"
        shape = (BANDS, 2, total)
        bands = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint64, shape=shape)
        for band in range(BANDS):
            keys = np.concatenate([np.zeros(0, np.uint64), *(part[:, band] for part in parts)])
            order = np.argsort(keys)
            bands[band] = keys[order], order.astype(np.uint64)
        bands.flush()
        os.replace(temporary, self.directory / "bands.npy")

    def found_in(self, texts: Sequence[str]) -> np.ndarray:
        """bool [texts]: whether a text is a near duplicate of an indexed one."""
        keys = band_keys(texts)
        candidates: list[set[int]] = [set() for _ in texts]
        for band, (known, rows) in enumerate(self._bands):
            first = np.searchsorted(known, keys[:, band])
            last = np.searchsorted(known, keys[:, band], side="right")
            for text in np.flatnonzero(last > first).tolist():
                candidates[text].update(rows[first[text] : last[text]].tolist())
        found = np.zeros(len(texts), bool)
        for number, (text, rows) in enumerate(zip(texts, candidates, strict=True)):
            if rows:
                others = map(self._text, sorted(rows))
                found[number] = any(are_similar(text, other) for other in others)
        return found

    def _text(self, row: int) -> str:
        texts, first = self._texts
        part = int(np.searchsorted(first, row, side="right")) - 1
        return texts[part][row - int(first[part])].as_py()

    @cached_property
    def _bands(self) -> np.ndarray:
        return np.load(self.directory / "bands.npy", mmap_mode="r")

    @cached_property
    def _texts(self) -> tuple[list[pa.ChunkedArray], np.ndarray]:
        files = sorted(self.directory.glob("*.texts"))
        texts = [read_table(file)["text"] for file in files]
        return texts, np.cumsum([0, *map(len, texts)])

    def __reduce__(self):
        return _opened, (self.directory,)


@lru_cache(1)
def _opened(directory: Path) -> NearDuplicates:
    return NearDuplicates(directory)


def shingles(text: str) -> set[str]:
    """The set of word 5-grams; of a text with fewer words, the text itself."""
    words = text.split()
    if len(words) < NGRAM:
        return {" ".join(words)}
    return {" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def band_keys(texts: Sequence[str]) -> np.ndarray:
    """uint64 [texts, BANDS]: two texts that share a key in a band are a candidate pair."""
    sets = ([part.encode() for part in shingles(text)] for text in texts)
    options = {"num_perm": BANDS * BAND_ROWS, "hashfunc": xxhash.xxh32_intdigest}
    values = [minhash.hashvalues for minhash in MinHash.generator(sets, **options)]
    signature = np.array(values, np.uint64).reshape(-1, BANDS, BAND_ROWS)
    factors = np.random.default_rng(20220713).integers(0, 2**64, BAND_ROWS, np.uint64) | np.uint64(
        1
    )
    return (signature * factors).sum(axis=2, dtype=np.uint64)


def are_similar(one: str, other: str) -> bool:
    """Whether the Jaccard index of the 5-grams is >= 0.8 and the words' edit similarity > 0.8."""
    first, second = shingles(one), shingles(other)
    common = len(first & second)
    if common < SIMILAR * (len(first) + len(second) - common):
        return False
    cutoff = np.nextafter(SIMILAR, 1)
    return Levenshtein.normalized_similarity(one.split(), other.split(), score_cutoff=cutoff) > 0
