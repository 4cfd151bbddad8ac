"""kill -9 in every phase of a run: nothing that was released is forgotten, few steps are lost, and
the run ends.

As a program, `python test_kills.py PHASE CALL DELAY ARGUMENTS` is fedsim with a bomb in it: it
kills itself DELAY seconds after the CALL-th time that the phase is entered.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_verify import command, write_texts

from fedsim.cli.main import main
from fedsim.run import checkpoint, directory, ledger, metrics
from fedsim.run.console import Console
from fedsim.trust.verify import verify

PHASES = {
    "calibration": ("fedsim.training.prepare", "make_plan"),
    "draw": ("fedsim.sampling.sampler", "Poisson.draw"),
    "step": ("fedsim.engine.engine", "Engine.clipped_sum"),
    "checkpoint": ("fedsim.models.weights", "write_with"),
    "ledger": ("fedsim.run.ledger", "ChainedLog.append"),
    "evaluation": ("fedsim.training.trainer", "evaluate"),
}
RUNS, LONGEST_DELAY = 9, 0.03
NUM_STEPS, EVERY = 12, 2
FLAGS = {"num-steps": NUM_STEPS, "checkpoint-every": EVERY, "seed": 3}
MAX_LOST = 2 * EVERY + 1
"""Steps that are released and in no checkpoint. A checkpoint is written while the steps after it go
on, up to the next one's, which waits for it, or the step after that, if that one is evaluated."""


def plant(phase, call, delay):
    """Kill this process `delay` seconds after the phase's function is entered for the call-th
    time; the ledger's also in the middle of its line."""
    module, path = PHASES[phase]
    *parts, name = path.split(".")
    holder = importlib.import_module(module)
    for part in parts:
        holder = getattr(holder, part)
    function, left = getattr(holder, name), call

    def bombed(*args, **options):
        nonlocal left
        if phase == "ledger" and args[0].path.name != ledger.FILE:
            return function(*args, **options)  # the ledger of the data
        left -= 1
        if left == 0 and phase == "ledger" and delay < LONGEST_DELAY / 2:
            log, line = args
            with open(log.path, "ab") as file:
                file.write(json.dumps(line).encode()[: int(1 + delay * 1e4)])
            os.kill(os.getpid(), signal.SIGKILL)
        if left == 0:
            threading.Thread(target=explode, daemon=True).start()
        return function(*args, **options)

    def explode():
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(holder, name, bombed)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.parquet")


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(RUNS))
def test_a_run_that_is_killed_in_every_phase_ends(number, texts, run_dir):
    rng = np.random.default_rng(number)
    algorithm = ("els", "uls")[number % 2]
    args = [*command(texts, run_dir, algorithm, **FLAGS), "--resume"]
    phases = ["calibration", *rng.permutation([p for p in PHASES if p != "calibration"])]
    released = 0
    for phase in phases:
        call = 1 if phase in ("calibration", "checkpoint", "evaluation") else rng.integers(1, 3)
        bomb = [phase, str(call), str(rng.uniform(0, LONGEST_DELAY))]
        done = subprocess.run([sys.executable, __file__, *bomb, *args], capture_output=True)
        if done.returncode == 0:  # it ended without entering the phase again: once more, anew
            shutil.rmtree(run_dir)
            released = 0
            done = subprocess.run([sys.executable, __file__, *bomb, *args], capture_output=True)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        if (run_dir / directory.CONFIG).exists() and (run_dir / ledger.FILE).exists():
            steps = ledger.steps_of(lines := ledger.read(run_dir))
            assert len(steps) >= released  # no step that was released is forgotten
            released = len(steps)
            segments, newest = ledger.segments_of(lines), checkpoint.latest(run_dir)
            saved = int(checkpoint.load(newest)["step"]) if newest else 0
            # Those that a segment before has lost are in no checkpoint until there is one.
            assert released - max(saved, segments[-1].first if segments else 0) <= MAX_LOST
            shown = max((line["step"] for line in metrics.read(run_dir)), default=0)
            assert shown <= released
            if released:
                checks = verify(run_dir, console=Console())
                assert [check for check in checks if check.holds is False] == []
    main(args)
    steps = ledger.steps_of(lines := ledger.read(run_dir))
    assert [line["step"] for line in steps] == list(range(NUM_STEPS))
    found = json.loads((run_dir / directory.SUMMARY).read_text())
    lost = ledger.lost_steps(ledger.segments_of(lines), NUM_STEPS)
    assert (found["steps_done"], found["lost_steps"]) == (NUM_STEPS, lost)
    assert [check for check in verify(run_dir, console=Console()) if check.holds is False] == []


if __name__ == "__main__":
    plant(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    main(sys.argv[4:])
