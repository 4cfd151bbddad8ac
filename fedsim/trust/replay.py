"""Replay: steps of a run computed again from its key and data, to compare every bit.

No file can show that gradients were clipped and noise was added; a replay shows it for the steps
that it repeats, segment by segment. Nothing new is released, and nothing is written to the run.
"""

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fedsim.errors import ConfigError
from fedsim.run import Differs, checkpoint, directory, ledger
from fedsim.signals import removed_at_end
from fedsim.training import Purpose, train
from fedsim.trust.evidence import Evidence, Interrupted, Unknown, Violated


def replay(evidence: Evidence, *, whole: bool) -> str:
    """Compute the last steps again, or all of them.

    Args: whole: start at the first step that is the run's own; else at the last checkpoint but one.

    Returns: The finding in words.

    Raises:
      Violated: the bits differ, although packages and kind of host were the same in each segment.
      Unknown: something is missing, or the bits cannot be compared.
      Interrupted: a signal stopped the replay.
    """
    key, _ = evidence.key, evidence.users
    kept = checkpoint.kept(evidence.run_dir)
    total = evidence.plan.num_steps
    if not kept or int(checkpoint.load(kept[-1])["step"]) != total:
        raise Unknown("the run has not ended")
    newest, older = kept[-1], [] if whole else kept[:-1]
    first = int(checkpoint.load(older[-1])["step"]) if older else 0
    which = "all" if first == 0 else f"the last {total - first} of"
    steps = f"{which} {total} steps (from step {first}), computed again from key and data"
    with _scratch() as copy:
        key.save(copy)
        for path in (directory.CONFIG, directory.TOKENIZER, ledger.FILE):
            if (evidence.run_dir / path).exists():
                shutil.copyfile(evidence.run_dir / path, copy / path)
        for path in older[-1:]:
            shutil.copyfile(path, copy / checkpoint.DIRECTORY / path.name)
        run = dataclasses.replace(evidence.run, run_dir=copy)
        try:
            settings = evidence.plan.algorithm, evidence.privacy, run, evidence.console
            again = train(*settings, purpose=Purpose.REPLAY)
        except Differs as error:
            _expect_comparable(evidence, first, error.step, error.computed_on, str(error))
            raise Violated(f"{evidence.run_dir / ledger.FILE}: {error}") from None
        except ConfigError as error:
            raise Unknown(f"cannot be computed again: {error}") from None
        if again["steps_done"] < total:
            raise Interrupted(f"interrupted after step {again['steps_done']} of {total}")
        same = _trained(checkpoint.kept(copy)[-1]) == _trained(newest)
    if not same:
        found = f"{steps}, give other parameters"
        _expect_comparable(evidence, first, total, again["computed_on"], found)
        raise Violated(f"{newest}: {found}")
    return f"{steps}, give the same bits"


def _expect_comparable(evidence: Evidence, first: int, last: int, here: str, found: str) -> None:
    """Raise Unknown if the steps were computed where bits may differ from those `here`."""
    segments = ledger.segments_of(evidence.lines)
    numbers = (max(0, ledger.number_of(segments, step)) for step in (first, last))
    for number in range(next(numbers), next(numbers) + 1):
        there = segments[number].computed_on
        which = f"cannot be compared: {found}, and segment {number + 1} was computed on {there}"
        if there != here:
            raise Unknown(f"{which}, not on {here}")
        if ", cpu," not in there:
            raise Unknown(f"{which}, which adds up in no fixed order")


def _trained(path: Path) -> str:
    """Digest of a checkpoint's parameters, average and optimizer state."""
    state = checkpoint.load(path)
    parts = {name: state.get(name) for name in ("params", "average", "opt_state")}
    return checkpoint.params_sha256(parts)


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
