"""One private step of a large model, its parts on several devices: memory and seconds.

    python -m experiments.benchmarks.mesh [--quick] [--json] [--model large] [--mesh fsdp:8]
                                                                   (half an hour; quick: a minute)

The model is fresh, its text random. Devices of a CPU stand in for accelerators, so memory is that
of all devices and of the host together: parameters, a gradient, the sum, what is released, and the
new parameters, besides what the devices gather. Users have one row of 64 positions, and are taken
one at a time by the strategy `scan`; the update is plain SGD.
"""

import argparse
import ctypes
import dataclasses
import json
import os
import sys
import time
from typing import Any

GIB = 2.0**30
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


@dataclasses.dataclass(frozen=True)
class Step:
    """What is measured."""

    model: str = "large"
    mesh: str = "fsdp:8"
    vocabulary: int = 260
    positions: int = 64


def measured(step: Step) -> dict[str, Any]:
    """One row: a step, from placed parameters to updated ones."""
    import jax
    import numpy as np
    import optax

    from experiments.benchmarks.common import peak_mib
    from fedsim.clipping import Clip, Strategy, num_coordinates
    from fedsim.config import MeshShape
    from fedsim.data import Dataset, UserStore
    from fedsim.engine.worker import LocalEngine
    from fedsim.keys import SecretKey
    from fedsim.mechanism import noisy_mean
    from fedsim.models import LanguageModelTask, preset
    from fedsim.placement import beside
    from fedsim.training.optimizers import is_finite, updater

    rng, shape = np.random.default_rng(0), MeshShape.parse(step.mesh)
    texts = rng.integers(step.vocabulary, size=(shape.devices, step.positions))
    users = UserStore.from_examples(
        {str(i): [text] for i, text in enumerate(texts)},
        max_length=step.positions,
        vocab_size=step.vocabulary,
    )
    config = preset(step.model, step.vocabulary, step.positions)
    task = LanguageModelTask(Dataset(train=users), config)
    engine = LocalEngine(task, num_lanes=1, mesh=shape)
    params = engine.place(random_params(config))
    row: dict[str, Any] = {**dataclasses.asdict(step), "parameters": num_coordinates(params)}
    row["placed_gib"] = peak_mib() / 1024
    clip, start = Clip(1.0, normalised=True), time.monotonic()
    rows = np.arange(shape.devices)[:, None]
    total, stats = engine.clipped_sum(params, rows, clip, Strategy())
    row["sum_s"], row["sum_gib"] = time.monotonic() - start, peak_mib() / 1024
    own = {"clip": clip, "noise_multiplier": 1.0, "count": shape.devices}
    noisy = noisy_mean(total, **own, key=SecretKey.create(0), step=0)
    row["noise_s"] = time.monotonic() - start - row["sum_s"]
    transformation = optax.sgd(0.1)
    state = transformation.init(params)
    grad = jax.tree.map(beside, noisy.values(like=params), params)
    del total, noisy
    params, _ = updater(transformation)(grad, state, params)
    row["finite"] = bool(is_finite(params))
    row["step_s"], row["peak_gib"] = time.monotonic() - start, peak_mib() / 1024
    row["norms"] = [float(norm) for norm in stats.norms]
    return row


def random_params(config) -> Any:
    """Parameters as a fresh model has, all blocks' in one tree, NumPy; drawn array by array."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import traverse_util

    from fedsim.models import Transformer
    from fedsim.placement import BLOCKS

    first = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    one = dataclasses.replace(config, num_layers=1)
    shapes = jax.eval_shape(Transformer(one).init, jax.random.key(0), first)["params"]
    rng, layers = np.random.default_rng(0), config.num_layers

    def drawn(path, leaf):
        shape = (layers, *leaf.shape) if path[0] == "block_0" else leaf.shape
        if path[-1] in ("bias", "scale"):
            return np.full(shape, float(path[-1] == "scale"), np.float32)
        deviation = leaf.shape[0] ** -0.5 if path[-1] == "kernel" else 0.02
        found = rng.standard_normal(shape, np.float32)
        return np.multiply(found, np.float32(deviation), out=found)

    leaves = traverse_util.flatten_dict(shapes)
    tree = traverse_util.unflatten_dict({path: drawn(path, leaf) for path, leaf in leaves.items()})
    return {BLOCKS if name == "block_0" else name: leaf for name, leaf in tree.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a model of 3 M parameters, fsdp:2")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default=Step.model)
    parser.add_argument("--mesh", default=Step.mesh)
    given = parser.parse_args(arguments)
    step = Step("small", "fsdp:2") if given.quick else Step(given.model, given.mesh)
    from fedsim.config import EngineConfig, MeshShape
    from fedsim.engine import set_threads

    set_threads(EngineConfig("local", mesh=step.mesh))
    # What is freed goes back at once: what the process keeps for later is no need of a device.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)
    # Collectives of many devices on few cores wait for each other for long.
    seconds = ("warn_stuck", "terminate")
    flags = [f"--xla_cpu_collective_call_{name}_timeout_seconds=600" for name in seconds]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    from experiments.benchmarks.common import at_most, circumstances

    row = measured(step)
    print(", ".join(f"{name} {value}" for name, value in row.items()), file=sys.stderr)
    most = {"small": 2.0}.get(step.model, 20e9 / GIB)
    bars = [at_most(f"peak GiB of one step, {MeshShape.parse(step.mesh)}", row["peak_gib"], most)]
    found = {**circumstances("fedsim", "jax", "jaxlib"), "rows": [row], "bars": bars}
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
