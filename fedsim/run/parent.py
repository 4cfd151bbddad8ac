"""Start a run from a checkpoint of another one, its parent, under a key of its own.

The first lines of its ledger are the parent's, so that its epsilon is that of all steps of its
model; the chain of the parent's ledger shows that they are. The folder `parent` keeps the
checkpoint. All else is as if the run had been stopped there, and it is resumed like any run.
"""

import dataclasses
from contextlib import closing
from pathlib import Path

from fedsim.files import new_directory
from fedsim.keys import SecretKey
from fedsim.plan import ledger_head
from fedsim.run import checkpoint, directory, ledger
from fedsim.run.directory import StoredRun
from fedsim.run.formats import Parent
from fedsim.run.ledger import Ledger, LedgerError
from fedsim.run.state import PARENT


def parent_of(run_dir: Path, path: Path | None) -> Parent:
    """The run in `run_dir` as the parent of another one.

    Args:
      path: its checkpoint that the other one starts from; None: it starts from the beginning.

    Raises:
      CheckpointError, LedgerError: checkpoint or ledger was changed, or they are of two runs.
    """
    lines = ledger.read(run_dir)
    chains = [line["chain"] for line in lines]
    run, step, digest = str(lines[0]["head"].get("key_seal")), 0, ""
    if path is not None:
        state = checkpoint.load(path)
        step, digest = int(state["step"]), checkpoint.state_sha256(state)
        if step >= len(chains) or checkpoint.chain(state) not in ("", chains[step]):
            raise LedgerError(f"{path}: is of another run than {run_dir / ledger.FILE}")
    return Parent(run, step, chains[0], chains[step], digest)


def begin_from(parent_dir: Path, run_dir: Path, stored: StoredRun, key: SecretKey) -> None:
    """Create the directory of a run that starts from a checkpoint of the run in `parent_dir`.

    Args:
      stored: the new run, with the `Parent` that `parent_of` returned.
      key: of the new run.

    Raises:
      ConfigError: `run_dir` exists, or cannot be written.
      CheckpointError, LedgerError: the parent was changed.
    """
    parent, plan = stored.parent, stored.plan
    assert parent is not None and plan is not None, "a run of train that has a parent"
    files = [parent_dir / name for name in (directory.TOKENIZER, directory.MODEL)]
    tokenizer, model = (path if path.exists() else None for path in files)
    with new_directory(run_dir) as made:
        made.chmod(0o700)
        with directory.create(made, stored, key, tokenizer, model):
            head = ledger_head(
                plan,
                config_sha256=directory.config_sha256(made),
                key_seal=key.seal("ledger"),
                parent=dataclasses.asdict(parent),
            )
            with closing(Ledger(made, head)) as book:
                book.take(ledger.read(parent_dir)[1 : 1 + parent.step])
                chain = book.chain
            if parent.step:
                named = checkpoint.stem(parent.step)
                kept = checkpoint.kept(parent_dir)
                state = checkpoint.load(next(path for path in kept if path.stem == named))
                state.pop(checkpoint.CHAIN, None)
                checkpoint.save(made / PARENT, parent.step, state, chain)
