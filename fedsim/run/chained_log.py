"""A file of JSON lines that are only ever added, each with a digest of itself and all before it.

So no byte can change, and no line go missing before one that is there, without this showing; that
the last lines are there has to be known from elsewhere. What a crash leaves of a last line is not
read, and removed before the next one is written. Who holds the file sees to it that nobody else
writes to it.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from fedsim.errors import FedsimError
from fedsim.files import open_to_append, write_durably

LINK = ', "chain": "{}"}}'
LINK_SIZE = len(LINK.format("0" * 64))

Link = Callable[[str, bytes], str]
"""The chain after a line, from the one before it and the line's bytes up to its own."""
Check = Callable[[dict[str, Any], int], None]
"""Raises ValueError, TypeError or KeyError unless a line, with its number from 0, can be relied
upon."""


class LedgerError(FedsimError):
    """The ledger does not say what the run is about to do."""


def link(chain: str, body: bytes) -> str:
    """The chain of a file that anyone can check: sha256, in hex."""
    return hashlib.sha256(chain.encode() + body).hexdigest()


class ChainedLog:
    """The lines of such a file, and what appends to it."""

    def __init__(self, path: Path, check: Check, link: Link = link, mode: int | None = None):
        """Read it; where there is none it is empty, and made by the first line.

        Args:
          link: `link`, or a keyed one.
          mode: of the file, if it is made; None: as the umask has it.
        Raises: LedgerError: a byte was changed, or a line before the last one removed.
        """
        self.path = path
        self._link, self._mode = link, mode
        self._file: IO[bytes] | None = None
        self.lines = parse(path.read_bytes() if path.exists() else b"", str(path), check, link)

    @property
    def chain(self) -> str:
        """Stands for all lines there are."""
        return self.chain_after(len(self.lines))

    def chain_after(self, num_lines: int) -> str:
        """Stands for the first `num_lines` lines; empty for none."""
        return self.lines[num_lines - 1]["chain"] if num_lines else ""

    def append(self, line: dict[str, Any]) -> None:
        """Add a line; it is durable when this returns."""
        body = json.dumps(line).encode()[:-1]
        chain = self._link(self.chain, body)
        if self._file is None:
            self._file = open_to_append(self.path, self._mode)
        write_durably(self._file, body + LINK.format(chain).encode() + b"\n")
        self.lines.append({**line, "chain": chain})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def parse(data: bytes, name: str, check: Check, link: Link = link) -> list[dict[str, Any]]:
    """The lines of a file's bytes, without one that a crash has cut off.

    Raises: LedgerError: naming `name` and the line.
    """
    *whole, rest = data.split(b"\n")
    chain, lines = "", []
    for number, line in enumerate(whole):
        chain = link(chain, line[:-LINK_SIZE])
        if line[-LINK_SIZE:] != LINK.format(chain).encode():
            raise LedgerError(f"{name}: line {number + 1} was changed, or one before it removed")
        try:
            check(record := json.loads(line), number)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise LedgerError(f"{name}: line {number + 1} is none of a ledger: {error}") from None
        lines.append(record)
    # A crash leaves the beginning of a line, and nothing after a line's end.
    end = rest.rfind(LINK.partition("{")[0].encode())
    if end >= 0 and len(rest) > end + LINK_SIZE:
        raise LedgerError(f"{name}: line {len(whole) + 1} was changed")
    return lines
