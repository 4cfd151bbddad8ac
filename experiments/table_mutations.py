"""The classic mistakes of private training, planted in fedsim: what notices each?

Claim: each is caught, by a test, by `fedsim verify --replay` on what the broken code trained (run
with the code as it is), by the audit's lower bound, or by several of these. `smoke` plants two and
asks the tests, `small` plants all and asks the tests, `paper` asks all three. Nothing is written to
the code: `planting` says how a mistake gets into a test and all processes that it starts.

    python -m experiments.table_mutations --scale paper
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.harness import common
from experiments.harness.planting import Mistake
from experiments.mistakes import MISTAKES, NOISE_AND_SENSITIVITY, SAMPLING

ROOT = Path(__file__).parents[1]
AT_ONCE = 2

CLAIM = 1.0
WEAK = 0.25  # of the bound of the code as it is
AUDIT = f"""
import json
import conftest  # with which tests find each other
from test_audit import ELS, ULS, audited
print(json.dumps([audited({CLAIM}, 0, algorithm=each).epsilon for each in (ELS, ULS)]))
"""
TRAIN = """
import sys
from fedsim.cli.main import main
for algorithm in ("els", "uls"):
    main(["train", algorithm, "--run-dir", f"run-{algorithm}", *sys.argv[1:]])
"""
VERIFY = """
from fedsim.cli.main import main
for algorithm in ("els", "uls"):
    try:
        main(["verify", f"run-{algorithm}", "--replay"])
    except SystemExit:
        pass  # with a promise that is broken
"""
TRAINING = {
    **{"epsilon": 4, "num-steps": 4, "batch-size": 24, "group-size": 2, "max-length": 24},
    **{
        "engine": "local",
        "checkpoint-every": 2,
        "strategy": "scan",
        "rows_per_pass": 2,
        "eval-every": 4,
    },
}


@dataclasses.dataclass(frozen=True)
class Settings:
    mistakes: tuple[str, ...] = tuple(mistake.name for mistake in MISTAKES)
    everything: bool = False
    """Ask verify and the audit, too, and not only the tests."""


SETTINGS = {
    "smoke": Settings((NOISE_AND_SENSITIVITY[0].name, SAMPLING[0].name)),
    "small": Settings(),
    "paper": Settings(everything=True),
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


def verify_says(sound: Path, own: Path, mistake: Mistake, texts: Path) -> str:
    """The promises that `verify --replay`, of the code as it is, finds broken, or "-"."""
    settings = [str(x) for name, v in TRAINING.items() for x in (f"--{name}", v)]
    args = ("--data", str(texts), *settings, *mistake.flags)
    trained = python(own, "-c", TRAIN, *args, where=own / "runs")
    if trained.returncode:
        return "the training fails"
    done = python(sound, "-c", VERIFY, where=own / "runs")
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    broken = set(re.findall(r"^VIOLATED\s+(\w+)", done.stdout, re.MULTILINE))
    return " ".join(sorted(broken)) or "-"


def bounds(own: Path) -> list[float] | None:
    """The audit's lower bounds on epsilon, of ELS and ULS; None: it fails."""
    done = python(own, "-c", AUDIT)
    return None if done.returncode else json.loads(done.stdout)


def audit_says(found: list[float] | None, sound: list[float]) -> str:
    """What the bounds mean, beside those of the code as it is."""
    if found is None:
        return "the audit fails"
    if max(found) > CLAIM:
        return f"epsilon is at least {max(found):.3g}, {CLAIM:g} claimed"
    weak = any(bound < WEAK * usual for bound, usual in zip(found, sound, strict=True))
    return "- (attack weakened)" if weak else "-"


def write_texts(path: Path) -> None:
    """Texts of 40 users, the more the later."""
    rng = np.random.default_rng(0)
    users = [f"user{u}" for u in range(40) for _ in range(1 + u // 5)]
    texts = [" ".join(rng.choice(["red", "green", "blue", "grey"], 4)) for _ in users]
    pq.write_table(pa.table({"user_id": users, "text": texts}), path)


def run(settings: Settings) -> list[dict[str, str]]:
    """A row for each mistake: plant it, and ask."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as threads:
        texts = Path(scratch) / "texts.parquet"
        write_texts(texts)
        sound = place(Path(scratch))
        usual = bounds(sound) if settings.everything else None
        if settings.everything:
            assert usual and 0 < min(usual) <= max(usual) <= CLAIM, usual

        def row(mistake: Mistake) -> dict[str, str]:
            own = place(Path(scratch), mistake)
            found = {"mistake": mistake.name, "test": tests_say(own, mistake.test)}
            if usual is None:
                return {**found, "verify": "not asked", "audit": "not asked"}
            found["verify"] = verify_says(sound, own, mistake, texts)
            return {**found, "audit": audit_says(bounds(own), usual)}

        rows = []
        for found in threads.map(row, [m for m in MISTAKES if m.name in settings.mistakes]):
            rows.append(found)
            print(*found.values(), sep=" | ", flush=True)
    return rows


def check(rows: list[dict[str, str]]) -> common.Claims:
    """Every mistake is caught by something."""
    missed = [row["mistake"] for row in rows if not caught(row)]
    numbers = f"{len(rows) - len(missed)} of {len(rows)}" + "".join(f"; not: {m}" for m in missed)
    return [("every mistake is caught", not missed, numbers)]


def caught(row: dict[str, str]) -> bool:
    """Whether something noticed: that the audit or the training fails is no such thing."""
    test, verify, audit = row["test"], row["verify"], row["audit"]
    return (
        test not in ("-", "not asked")
        or verify not in ("-", "not asked", "the training fails")
        or audit.startswith("epsilon is at least")
    )


if __name__ == "__main__":
    common.main(globals())
