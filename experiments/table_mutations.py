"""The classic mistakes of private training, planted in a copy of fedsim: what notices each?

Claim: each is caught, by a test, by `fedsim verify --replay` on what the broken code trained (run
with the code as it is), by the audit's lower bound, or by several of these. `smoke` plants two and
asks the tests, `small` plants all and asks the tests, `paper` asks all three.

    python -m experiments.table_mutations --scale paper
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments import common
from experiments.mistakes import MISTAKES, SAMPLING, Mistake

ROOT = Path(__file__).parents[1]
AT_ONCE = 2

CLAIM = 1.0
WEAK = 0.25  # of the bound of the code as it is
AUDIT = f"""
import json
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
    **{"epsilon": 4, "num-steps": 4, "budget": 24, "group-size": 2, "max-length": 24},
    **{"engine": "local", "checkpoint-every": 2, "strategy": "scan:2", "eval-every": 4},
}


@dataclasses.dataclass(frozen=True)
class Settings:
    mistakes: tuple[str, ...] = tuple(mistake.name for mistake in MISTAKES)
    everything: bool = False
    """Ask verify and the audit, too, and not only the tests."""


SETTINGS = {
    "smoke": Settings((MISTAKES[0].name, SAMPLING[0].name)),
    "small": Settings(),
    "paper": Settings(everything=True),
}


def copy_of(scratch: Path) -> Path:
    """A copy of the project in a new directory."""
    copy = Path(tempfile.mkdtemp(dir=scratch))
    for name in ("fedsim", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def python(copy: Path, *args: str, where: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python with the fedsim of a copy, in a cache of its own: what one mistake made, no other run
    may find. JAX's compiled programs are named by all that they were made of, so those are shared.

    Args: where: the directory to be in; default: the copy.
    """
    cache, compiled = copy / "cache", copy.parent / "compiled"
    for directory in (cache, compiled):
        directory.mkdir(mode=0o700, exist_ok=True)
    if not (cache / "compiled").exists():
        (cache / "compiled").symlink_to(compiled)
    environment = {
        **os.environ,
        **{"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tests'}", "FEDSIM_CACHE_DIR": str(cache)},
        **{"JAX_PLATFORMS": "cpu", "NPROC": "1"},
    }
    return subprocess.run(
        [sys.executable, *args], cwd=where or copy, env=environment, capture_output=True, text=True
    )


def tests_say(copy: Path, tests: str) -> str:
    """The test that fails, or "-"."""
    options = ["-x", "-q", "-m", "", "-p", "no:cacheprovider"]  # slow ones, too
    done = python(copy, "-m", "pytest", *options, f"tests/{tests}")
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return failed[1].removeprefix("tests/").partition("[")[0]
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    return "-"


def verify_says(sound: Path, copy: Path, mistake: Mistake, texts: Path) -> str:
    """The promises that `verify --replay`, of the code as it is, finds broken, or "-"."""
    settings = [str(x) for name, v in TRAINING.items() for x in (f"--{name}", v)]
    runs = copy / "runs"  # a directory without a fedsim, which Python would import before others
    runs.mkdir()
    args = ("--data", str(texts), *settings, *mistake.flags)
    trained = python(copy, "-c", TRAIN, *args, where=runs)
    if trained.returncode:
        return "the training fails"
    done = python(sound, "-c", VERIFY, where=runs)
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    broken = set(re.findall(r"^VIOLATED\s+(\w+)", done.stdout, re.MULTILINE))
    return " ".join(sorted(broken)) or "-"


def bounds(copy: Path) -> list[float] | None:
    """The audit's lower bounds on epsilon, of ELS and ULS; None: it fails."""
    done = python(copy, "-c", AUDIT)
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
        sound = copy_of(Path(scratch))
        usual = bounds(sound) if settings.everything else None
        if settings.everything:
            assert usual and 0 < min(usual) <= max(usual) <= CLAIM, usual

        def row(mistake: Mistake) -> dict[str, str]:
            copy = copy_of(Path(scratch))
            mistake.plant(copy / "fedsim")
            found = {"mistake": mistake.name, "test": tests_say(copy, mistake.tests)}
            if usual is None:
                return {**found, "verify": "not asked", "audit": "not asked"}
            found["verify"] = verify_says(sound, copy, mistake, texts)
            return {**found, "audit": audit_says(bounds(copy), usual)}

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
    common.main("table_mutations", __doc__, SETTINGS, run, check)
