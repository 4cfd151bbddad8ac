"""A made-up source with the shape of Stack Overflow (Charles et al. 2024, Table 1), or a part.

Numbers of examples per user follow a log-normal law fitted to the table: its median and its total,
with one user of the largest size. Texts are random letters. For benchmarks and tests of size; says
nothing about language.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.optimize import brentq
from scipy.special import ndtri

from fedsim.errors import DataError

FILE_ROWS = 2**22
GROUP_ROWS = 2**19


@dataclass(frozen=True)
class Shape:
    """How many examples there are and whose."""

    num_examples: int = 135_818_730
    num_users: int = 342_477
    median: int = 183
    largest: int = 194_167
    mean_characters: int = 15
    """Letters of a text; with the tokenizer `bytes` an example has two tokens more."""

    def scaled(self, share: float) -> "Shape":
        """A share of users and examples, with the same median; the largest user by its root."""
        examples, users = (round(n * share) for n in (self.num_examples, self.num_users))
        largest = round(self.largest * share**0.5)
        return Shape(examples, users, self.median, largest, self.mean_characters)


STACK_OVERFLOW = Shape()


def sizes(shape: Shape) -> np.ndarray:
    """int64 [users], descending: examples of each user; exact in total, median and maximum.

    Raises: DataError: no such sizes exist.
    """
    quantiles = ndtri((np.arange(shape.num_users) + 0.5) / shape.num_users)[::-1]

    def of(spread: float) -> np.ndarray:
        found = np.clip(shape.median * np.exp(spread * quantiles), 1, shape.largest)
        found = np.round(found).astype(np.int64)
        found[0] = shape.largest
        return found

    def excess(spread: float) -> float:
        return float(of(spread).sum() - shape.num_examples)

    if excess(0.0) > 0 or excess(5.0) < 0:
        raise DataError(f"num_examples={shape.num_examples}: expected another size for {shape}")
    spread = float(brentq(excess, 0.0, 5.0, xtol=1e-9))  # pyright: ignore
    found = of(spread)
    missing = shape.num_examples - int(found.sum())
    upper = slice(1, shape.num_users // 4)  # far from the median
    room = found[upper]
    room += np.sign(missing) * (np.arange(len(room)) < abs(missing))
    return found


def write(directory: Path, shape: Shape, seed: int = 0) -> list[Path]:
    """Writes Parquet files (user_id int64, text) with users' rows mixed, as time would mix them.

    Takes four bytes of memory per example. The same shape and seed give the same rows.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    counts = sizes(shape)
    users = np.repeat(rng.permutation(shape.num_users).astype(np.int32), counts)
    rng.shuffle(users)
    letters = np.frombuffer(b"etaoin shrdlu cm", np.uint8)
    files = []
    for number, start in enumerate(range(0, len(users), FILE_ROWS)):
        own = users[start : start + FILE_ROWS]
        lengths = rng.integers(1, 2 * shape.mean_characters, len(own))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        data = letters[rng.integers(0, 16, offsets[-1], np.uint8)]
        data[offsets[:-1]] = ord("x")  # no text is blank
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        texts = pa.StringArray.from_buffers(len(own), *buffers[1:])
        table = pa.table({"user_id": own.astype(np.int64), "text": texts})
        files.append(directory / f"part-{number:05d}.parquet")
        pq.write_table(
            table, files[-1], row_group_size=GROUP_ROWS, use_dictionary=False, compression="lz4"
        )
    return files
