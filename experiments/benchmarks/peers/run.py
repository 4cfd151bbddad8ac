"""Runs the peers, each in an environment of its own that is made here once (minutes)."""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsim.files import cache_dir
from fedsim.models import TransformerConfig

HERE = Path(__file__).parent
REQUIREMENTS = {
    "transformers": ["torch==2.13.0", "transformers==5.24.0", "peft==0.21.2"],
    "clipping": [
        *("torch==2.13.0", "transformers==5.24.0", "peft==0.21.2"),
        *("opacus==1.6.*", "opake==0.16.*"),
    ],
}
ONE_THREAD = {
    **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu"},
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
MKL_ASKS = ("cpu", "cpu_true")


class Adapters:
    """A process of peft_adapters.py, which computes gradients when it is asked to; one thread."""

    def __init__(
        self,
        config: TransformerConfig,
        rank: int,
        sizes: Sequence[int],
        ways: Mapping[str, Sequence[int]],
        *,
        mkl: bool = False,
    ):
        """Start it.

        Args:
          sizes: tokens of each row.
          ways: by name, as in clipped_gradients.py, rows of a pass.
          mkl: with MKL at its full speed; see `mkl_says_intel`.
        """
        given = [shape_of(config), *map(json.dumps, (rank, sizes, ways))]
        python = environment("clipping") / "bin" / "python"
        preload = {"LD_PRELOAD": str(mkl_says_intel())} if mkl else {}
        self._process = subprocess.Popen(
            [str(python), str(HERE / "peft_adapters.py"), *given],
            env={**os.environ, **ONE_THREAD, **preload},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.trials: dict[str, tuple[float, float]] = self._printed()
        """Processor seconds and memory in MiB by WAY:ROWS."""

    def seconds(self, name: str) -> "Seconds":
        """Processor seconds of all rows by WAY:ROWS, or of the products."""
        assert self._process.stdin is not None, "a pipe"
        print(name, file=self._process.stdin, flush=True)
        return Seconds(self._printed())

    def _printed(self) -> Any:
        assert self._process.stdout is not None, "a pipe"
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"peft_adapters.py: exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(BrokenPipeError):  # it was killed, as for memory
            self._process.communicate()


class Seconds(float):
    """Processor seconds that another process measured."""


def shape_of(config: TransformerConfig) -> str:
    """A model's shape as JSON, in the words of transformers."""
    shape = {"vocab_size": config.vocab_size, "hidden_size": config.width}
    shape |= {"intermediate_size": config.hidden, "num_hidden_layers": config.num_layers}
    shape |= {"num_attention_heads": config.num_heads, "num_key_value_heads": config.kv_heads}
    return json.dumps(shape | {"max_position_embeddings": config.max_length})


@functools.cache
def mkl_says_intel() -> Path | None:
    """A library to preload that answers MKL's question for the processor's maker.

    MKL has its fast kernels for its maker's processors alone. None: there is no C compiler.
    """
    if shutil.which("cc") is None:
        return None
    library = cache_dir() / "peers" / "mkl_says_intel.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    source = "".join(f"int mkl_serv_intel_{name}(void) {{ return 1; }}" for name in MKL_ASKS)
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=source, text=True, check=True)
    return library


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
