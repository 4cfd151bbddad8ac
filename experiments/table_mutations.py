"""The classic mistakes of private training, planted in fedsim: does a test notice each?

Each names the test that should. `smoke` plants two, `small` all. Nothing is written to the code:
`planting` says how a mistake gets into a test and all processes that it starts.

    python -m experiments.table_mutations --scale small
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.harness import experiment
from experiments.mistakes import MISTAKES, NOISE_AND_SENSITIVITY, SAMPLING
from experiments.planting import Mistake

ROOT = Path(__file__).parents[1]
AT_ONCE = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    mistakes: tuple[str, ...] = tuple(mistake.name for mistake in MISTAKES)


SETTINGS = {
    "smoke": Settings((NOISE_AND_SENSITIVITY[0].name, SAMPLING[0].name)),
    "small": Settings(),
}


def place(scratch: Path, mistake: Mistake | None = None) -> Path:
    """A new directory for what one mistake makes, where no other run finds it, and for the hook
    that plants it."""
    own = Path(tempfile.mkdtemp(dir=scratch))
    compiled = scratch / "compiled"  # JAX names programs by all that they were made of
    for directory in (own / "cache", own / "runs", own / "ledger", compiled):
        directory.mkdir(mode=0o700, exist_ok=True)
    (own / "cache" / "compiled").symlink_to(compiled)
    if mistake is not None:
        (own / "sitecustomize.py").write_text(mistake.hook())
    return own


def python(own: Path, *args: str, where: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Python with the mistake of a `place`. Args: where: the directory to be in."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (own, ROOT, ROOT / "tests"))),
        "FEDSIM_CACHE_DIR": str(own / "cache"),
        "FEDSIM_BUDGET_LEDGER": str(own / "ledger"),
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
    }
    return subprocess.run(
        [sys.executable, *args], cwd=where, env=environment, capture_output=True, text=True
    )


def tests_say(own: Path, test: str) -> str:
    """The test that fails, or "-". Raises: RuntimeError: what was planted cannot run."""
    options = ["-x", "-q", "-m", "", "--tb=short", "-p", "no:cacheprovider"]  # slow ones, too
    done = python(own, "-m", "pytest", *options, f"tests/{test}")
    if done.returncode == 1 and (failed := failing(done.stdout)):
        return failed
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return "-"


def failing(said: str) -> str | None:
    """The test that failed, by what pytest said; None: no test did, or what was planted raised the
    error, and not fedsim or the test, which says nothing of the mistake."""
    failed = re.search(r"^FAILED tests/([^\s\[]+)", said, re.MULTILINE)
    ours = r"^(fedsim|tests|experiments)/\S+:\d+: in "
    frames = re.findall(ours, said.partition("\nE  ")[0], re.MULTILINE)
    return failed[1] if failed and frames[-1:] != ["experiments"] else None


def run(settings: Settings) -> list[dict[str, str]]:
    """A row for each mistake: plant it, and run its test."""

    def row(mistake: Mistake) -> dict[str, str]:
        own = place(Path(scratch), mistake)
        found = {"mistake": mistake.name, "test": tests_say(own, mistake.test)}
        print(*found.values(), sep=" | ", flush=True)
        return found

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as threads:
        return [*threads.map(row, [m for m in MISTAKES if m.name in settings.mistakes])]


if __name__ == "__main__":
    experiment.main(globals())
