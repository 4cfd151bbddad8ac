"""Runs the peers, each in an environment of its own that is made here once (minutes)."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from fedsim.files import cache_dir

HERE = Path(__file__).parent
REQUIREMENTS = {
    "pfl": ["torch==2.13.0", "pfl[pytorch]==0.6.*", "h5py"],
    "opacus": ["torch==2.13.0", "opacus==1.6.*"],
    "transformers": ["torch==2.13.0", "transformers==5.24.0", "peft==0.21.2"],
    "flower": ["flwr[simulation]==1.41.*"],
    "fedjax": [
        *("fedjax==0.0.17", "jax==0.4.35", "numpy<2"),
        *("dm-haiku==0.0.13", "optax==0.2.3", "chex==0.1.87"),
    ],
}
ONE_THREAD = {
    **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu"},
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


def rounds(peer: str, *arguments, processes: int = 1, core: int | None = None):
    """What a peer's script prints, on as many cores as it has processes.

    Args: core: keep it to this core; for comparisons with one worker.
    """
    script = [str(HERE / f"{peer}_rounds.py"), *map(str, arguments)]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        script = [*launcher, f"--nproc_per_node={processes}", *script]
    return _printed(peer, script, core)


def clipping(peer: str, *arguments):
    """What a peer's script of clipped gradients prints; on one thread."""
    return _printed(peer, [str(HERE / f"{peer}_clipping.py"), *map(str, arguments)])


def adapters(*arguments):
    """What the script of PEFT's gradients prints; on one thread."""
    script = str(HERE / "peft_adapters.py")
    return _printed("transformers", [script, *map(str, arguments)])


def decoding(*arguments):
    """What the script of transformers' sampling prints; on one thread."""
    script = str(HERE / "transformers_decoding.py")
    return _printed("transformers", [script, *map(str, arguments)])


def models(*arguments):
    """What the script that makes and reads models with `transformers` prints."""
    script = str(HERE / "transformers_models.py")
    return _printed("transformers", [script, *map(str, arguments)])


def _printed(peer: str, script: list[str], core: int | None = None):
    """The last line that the script prints, JSON, with the peer's own packages."""
    python = environment(peer) / "bin" / "python"
    found = subprocess.run(
        [str(python), *script],
        env={**os.environ, **(ONE_THREAD if peer != "flower" else {})},
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise RuntimeError(f"{peer} {script}: exit code {found.returncode}: {found.stderr}")
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
