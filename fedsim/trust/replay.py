"""Replay: steps of a run computed again from its key and data, to compare every bit.

No file can show that gradients were clipped and noise was added; a replay shows it for the steps
that it repeats.
"""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedsim.engine import versions
from fedsim.errors import ConfigError
from fedsim.run import checkpoint, directory, ledger
from fedsim.signals import removed_at_end
from fedsim.training import FILE as EVALUATIONS, Evaluated, Purpose, train
from fedsim.trust.evidence import Evidence, Interrupted, Unknown, Violated


def replay(evidence: Evidence, *, whole: bool) -> str:
    """Compute the last steps again, or all of them.

    Args:
      whole: start at the first step that is the run's own; else at the last checkpoint but one.

    Returns:
      The finding in words.

    Raises:
      Violated: the bits differ, although packages and host were the same during the whole run.
      Unknown: something is missing, or the bits may differ for another reason.
      Interrupted: a signal stopped the replay.
    """
    key, _ = evidence.key, evidence.users
    kept = checkpoint.kept(evidence.run_dir)
    total = evidence.plan.num_steps
    if not kept or checkpoint.load_step(kept[-1]) != total:
        raise Unknown("the run has not ended")
    newest, older = kept[-1], [] if whole else kept[:-1]
    if evidence.plan.evaluations is not None:
        # A missing loss would be computed again: two losses under one noise.
        losses = Evaluated(evidence.run_dir).losses
        if len(losses) < evidence.plan.evaluations.count:
            raise Unknown(f"{EVALUATIONS} does not have all that was released")
    first = checkpoint.load_step(older[-1]) if older else 0
    which = "all" if first == 0 else f"the last {total - first} of"
    steps = f"{which} {total} steps (from step {first}), computed again from key and data"
    with _scratch() as copy:
        key.save(copy)
        for path in (directory.CONFIG, directory.TOKENIZER, ledger.FILE, EVALUATIONS):
            if (evidence.run_dir / path).exists():
                shutil.copyfile(evidence.run_dir / path, copy / path)
        for path in older[-1:]:
            shutil.copyfile(path, copy / checkpoint.DIRECTORY / path.name)
        run = dataclasses.replace(evidence.run, run_dir=copy)
        try:
            settings = evidence.plan.algorithm, evidence.privacy, run, evidence.console
            again = train(*settings, purpose=Purpose.REPLAY)
        except ledger.OtherBits as error:
            if moved := _moved(evidence):
                raise Unknown(f"cannot tell: other bits than the ledger has, and {moved}") from None
            raise Violated(f"{evidence.run_dir / ledger.FILE}: {error}") from None
        except ConfigError as error:
            raise Unknown(f"cannot be computed again: {error}") from None
        if again["steps_done"] < total:
            raise Interrupted(f"interrupted after step {again['steps_done']} of {total}")
        same = _trained(checkpoint.kept(copy)[-1]) == _trained(newest)
    if same:
        return f"{steps}, give the same bits"
    if why := directory.other_bits(evidence.stored, versions(), again["host"]):
        raise Unknown(f"cannot tell: {steps}, give other bits, and so may {why}")
    if moved := _moved(evidence):
        raise Unknown(f"cannot tell: {steps}, give other bits, and {moved}")
    raise Violated(f"{newest}: {steps}, give other parameters")


def _moved(evidence: Evidence) -> str:
    """Reason in the last checkpoint why the run may have other bits; empty if there is none.

    The checkpoint is trusted because it has the ledger's chain; `summary.json` is not used.
    """
    if (newest := checkpoint.latest(evidence.run_dir)) is None:
        return ""
    state = checkpoint.load(newest)
    elsewhere = "the run went on where bits may be others"
    if lost := int(state["lost_steps"]):
        return f"{elsewhere}, and lost {lost} steps"
    return elsewhere if int(state.get("resumed_elsewhere", 0)) else ""


def _trained(path: Path) -> str:
    """Digest of a checkpoint's parameters, average and optimizer state."""
    return checkpoint.state_sha256(checkpoint.load(path))


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """A private directory for the copy of a run, which is removed in any case."""
    with (
        tempfile.TemporaryDirectory(prefix="fedsim-replay-") as directory,
        removed_at_end(Path(directory)),
    ):
        copy = Path(directory) / "run"
        (copy / checkpoint.DIRECTORY).mkdir(parents=True)
        yield copy
