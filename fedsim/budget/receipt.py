"""A run's receipt: the line of the ledger of the data that counts it.

The receipt is in the run's directory, so that a ledger that was replaced or cut shows.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.budget.ledger import OPENED, BudgetLedger, Released, is_in, open_locked
from fedsim.errors import FileDamaged
from fedsim.files import read_json, write_json
from fedsim.run import RECEIPT, LedgerError


class Receipt(NamedTuple):
    """The content of budget.json in a run's directory."""

    run_dir: Path
    ledger: str
    """Directory of the ledger."""
    line: int
    """Number of the line, from 1."""
    chain: str
    """Chain of the ledger after that line."""

    @classmethod
    def of(cls, run_dir: Path) -> "Receipt | None":
        """The receipt of a run; None if it is not counted. Raises FileDamaged: it is malformed."""
        path = run_dir / RECEIPT
        if not path.exists():
            return None
        record = read_json(path)
        if [type(record.get(name)) for name in ("ledger", "line", "chain")] != [str, int, str]:
            raise FileDamaged(f"{path}: expected the ledger, a line and its link")
        return cls(run_dir, record["ledger"], record["line"], record["chain"])

    def write(self) -> None:
        """Write the receipt to the run's directory."""
        record = {"ledger": self.ledger, "line": self.line, "chain": self.chain}
        write_json(self.run_dir / RECEIPT, record, mode=0o600)

    @property
    def away(self) -> str:
        """Why the ledger, or what is left of it, cannot be read on this machine, or empty."""
        place = Path(self.ledger)
        if not (os.access(place, os.R_OK | os.X_OK) and is_in(place)):
            return "is not here"
        return "" if os.access(place, os.W_OK) else "cannot be locked here"

    def line_in(self, ledger: BudgetLedger, run: str | None = None) -> dict[str, Any]:
        """The line that counts the run. Raises LedgerError: it is missing, or of another run.

        Args: run: the run's identifier in the ledger; None if it is not known.
        """
        name = str(self.run_dir / RECEIPT)
        ledger.expect_line(self.line, self.chain, name)
        line = ledger.line(self.line)
        if line["what"] != OPENED or run not in (None, line["run"]):
            raise LedgerError(f"{name}: line {self.line} of {ledger.directory} is another run's")
        return line


def expect_receipt(run_dir: Path, run: str, label: str, planned: Released) -> tuple[bool, str]:
    """Check that the ledger of the data counts a run with all that it planned.

    Args:
      run, label, planned: see `Entry`.

    Returns:
      Whether the ledger is on this machine and counts the run, and a message; it does not say where
      the ledger is, because readers of a report need not know.

    Raises:
      LedgerError, FileDamaged: the ledger was changed, or disagrees on the run, its plan or its
        guarantee.
    """
    receipt = Receipt.of(run_dir)
    if receipt is None:
        return False, "in no ledger of the data: what other runs on them spent is not known"
    if receipt.away:
        return False, f"the ledger of the data, which {RECEIPT} names, {receipt.away}"
    with open_locked(Path(receipt.ledger)) as ledger:
        receipt.line_in(ledger, run)
        counted = ledger.entries[run]
        same = {
            f"epsilon as {'a' if label else 'no'} guarantee": bool(counted.label) == bool(label),
            "other planned releases": counted.planned == planned,
        }
        for what, holds in same.items():
            if not holds:
                raise LedgerError(f"{run_dir}: {receipt.ledger} has {what}: the plan was changed")
        return True, f"line {receipt.line} of {ledger.num_lines} in the ledger of the data"
