"""Runs a peer in an environment of its own, which is made here once (minutes)."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from fedsim.files import cache_dir

HERE = Path(__file__).parent
REQUIREMENTS = {"transformers": ["torch==2.13.0", "transformers==5.24.0", "peft==0.21.2"]}
ONE_THREAD = {
    **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu"},
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


def models(*arguments):
    """What the script that makes and reads models with `transformers` prints, on one thread."""
    python = environment("transformers") / "bin" / "python"
    found = subprocess.run(
        [str(python), str(HERE / "transformers_models.py"), *map(str, arguments)],
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise RuntimeError(f"transformers: exit code {found.returncode}: {found.stderr}")
    return json.loads(found.stdout.strip().splitlines()[-1])


def environment(peer: str) -> Path:
    """The peer's virtual environment."""
    directory = cache_dir() / "peers" / peer
    if not (directory / "complete").exists():
        print(f"installing {peer} into {directory}", file=sys.stderr)
        venv.create(directory, with_pip=True, clear=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *REQUIREMENTS[peer]], check=True)
        (directory / "complete").touch()
    return directory
