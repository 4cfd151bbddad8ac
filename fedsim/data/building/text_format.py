"""How text files are written: what stands between the columns of CSV, and in which encoding."""

import codecs
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pyarrow as pa

from fedsim.errors import DataError

NONE, MINIMAL = "none", "minimal"


@dataclass(frozen=True)
class Form:
    """What a file's name does not say of it."""

    delimiter: str | None = None
    """What stands between columns. None: a comma, or a tab in a file named .tsv."""
    encoding: str = "utf-8"
    quoting: str | None = None
    """What quotation marks in CSV are. "none": characters like others. "minimal": they stand around
    what has delimiters or line ends in it. None: the same, unless a file reads as well without."""

    def __post_init__(self):
        one = self.delimiter is None or len(self.delimiter) == 1 and self.delimiter not in '"\r\n'
        if not one:
            raise DataError.of("delimiter", self.delimiter, "one character, such as ; or |")
        if self.quoting not in (None, NONE, MINIMAL):
            raise DataError.of("quoting", self.quoting, f"{NONE} or {MINIMAL}")
        try:
            "".encode(self.encoding)
            codecs.getincrementaldecoder(self.encoding)().decode(pa.py_buffer(b""))  # as Arrow
        except (AttributeError, LookupError, TypeError, ValueError):  # punycode takes only bytes
            raise DataError.of(
                "encoding", self.encoding, "an encoding of text that Python knows, such as latin1"
            ) from None

    def between(self, file: Path) -> str:
        """What stands between this file's columns."""
        if self.delimiter is not None:
            return self.delimiter
        return "\t" if file.name.removesuffix(".gz").endswith(".tsv") else ","

    @property
    def decoder(self) -> str:
        """The encoding, in which a file may begin with a mark of its byte order."""
        utf8 = codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig")
        return "utf-8-sig" if utf8 else self.encoding

    @property
    def has_lines(self) -> bool:
        """Whether the bytes of a line end mean one everywhere, so that a file can be cut there."""
        return self.decoder == "utf-8-sig" or "\n{}".encode(self.encoding) == b"\n{}"

    def opened(self, file: Path, *, errors: str = "strict") -> TextIO:
        """The characters of a file, line ends as they are."""
        opener = gzip.open if file.suffix == ".gz" else open
        return opener(file, "rt", encoding=self.decoder, errors=errors, newline="")
