"""A run's receipt: where the ledger of its data counts it, and what that ledger says of it.

It is in the run's directory, so an older copy of the ledger, or another one in its place, shows.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from fedsim.budget.ledger import FILE, BudgetLedger, hold
from fedsim.budget.spending import Total, books_of
from fedsim.errors import FileDamaged
from fedsim.files import read_json, write_json
from fedsim.run import RECEIPT, LedgerError, ledger as run_ledger


class Receipt(NamedTuple):
    """Where a run is counted, by the file in its directory."""

    run_dir: Path
    ledger: str
    """The directory of the ledger."""
    line: int
    """From 1."""
    chain: str
    """Of the ledger after that line."""

    @classmethod
    def of(cls, run_dir: Path) -> "Receipt | None":
        """That of a run; None: it is not counted. Raises: FileDamaged: it does not say where."""
        path = run_dir / RECEIPT
        if not path.exists():
            return None
        record = read_json(path)
        if [type(record.get(name)) for name in ("ledger", "line", "chain")] != [str, int, str]:
            raise FileDamaged(f"{path}: expected the ledger, a line and its link")
        return cls(run_dir, record["ledger"], record["line"], record["chain"])

    def write(self) -> None:
        """Put it into the run's directory."""
        record = {"ledger": self.ledger, "line": self.line, "chain": self.chain}
        write_json(self.run_dir / RECEIPT, record, mode=0o600)

    def is_here(self) -> bool:
        """Whether the ledger can be read on this machine."""
        return os.access(self.ledger, os.R_OK | os.X_OK)

    def can_be_held(self) -> bool:
        """Whether the ledger is there and can be written here."""
        return (Path(self.ledger) / FILE).is_file() and os.access(self.ledger, os.W_OK)

    def line_in(self, ledger: BudgetLedger, run: str | None = None) -> dict[str, Any]:
        """The line in which the run is counted.

        Args: run: what the ledger knows the run by; None: that is not known here.
        Raises: LedgerError: the ledger does not have it, or it is another run's.
        """
        name = str(self.run_dir / RECEIPT)
        ledger.expect_line(self.line, self.chain, name)
        line = ledger.line(self.line)
        if run is not None and line.get("run") != run:
            raise LedgerError(f"{name}: line {self.line} of {ledger.directory} is another run's")
        return line


@dataclasses.dataclass(frozen=True)
class Together:
    """What all runs that saw a run's users have cost."""

    num_runs: int
    total: Total


def together(run_dir: Path, delta: float) -> Together | None:
    """What all runs on a run's users have cost the one who pays most; None: in no ledger here.

    Raises: LedgerError, FileDamaged: the ledger was cut or changed, or the receipt is another's.
    """
    receipt = Receipt.of(run_dir)
    if receipt is None or not receipt.is_here():
        return None
    with hold(Path(receipt.ledger)) as ledger:
        line = receipt.line_in(ledger, str(run_ledger.head(run_dir).get("key_seal")))
        spent = books_of(ledger, ledger.users_of(line["users"]))
        return Together(len(spent.charges), spent.total(delta))


def expect_receipt(run_dir: Path, run: str, label: str) -> tuple[bool, str]:
    """(Whether the ledger of the data is here, and has this run; what is there to say of it).

    Where the ledger is, is nobody's business who reads a report.

    Args: run, label: see `Entry`.
    Raises: LedgerError, FileDamaged: the ledger was cut, has another run in its place, or a label
      where there is none, or none where there is one.
    """
    receipt = Receipt.of(run_dir)
    if receipt is None:
        return False, "in no ledger of the data: what other runs on them spent is not known"
    if not receipt.is_here():
        return False, f"the ledger of the data, which {RECEIPT} names, is not here"
    with hold(Path(receipt.ledger)) as ledger:
        if bool(receipt.line_in(ledger, run)["label"]) != bool(label):
            said = "a guarantee" if label else "no guarantee"
            raise LedgerError(
                f"{run_dir}: {receipt.ledger} has epsilon as {said}: the plan was changed"
            )
        return True, f"line {receipt.line} of {ledger.num_lines} in the ledger of the data"
