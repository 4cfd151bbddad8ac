"""How much the devices of this process have at the moments of a clipped sum."""

import jax
import numpy as np

from fedsim.clipping import Clip, Strategy
from fedsim.config import MeshShape
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.engine.memory import Footprint
from fedsim.engine.sharded import ShardedWorker
from fedsim.models import lora
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.shapes import shapes_of
from fedsim.models.transformer import TransformerConfig

POSITIONS = 65
LAYER = 4 * (12 * 64**2 + 13 * 64)  # bytes of one, less those of adapters
AFTER = ("update", "evaluation")


def problem(units, rows, *, rank=0, vocabulary=64):
    """(task, parameters, shapes of both kinds) with random text and parameters."""
    config = TransformerConfig(vocabulary, POSITIONS, 64, 6, 4)
    config = lora.adapted(config, rank, 16.0, "all") if rank else config
    own, fixed = shapes_of(config)
    rng = np.random.default_rng(0)
    texts = rng.integers(vocabulary, size=(units, rows, POSITIONS - 1))
    users = {str(number): list(unit) for number, unit in enumerate(texts)}
    store = UserStore.from_examples(users, max_length=POSITIONS, vocab_size=vocabulary)

    def drawn(tree):
        return jax.tree.map(lambda x: rng.normal(0, 0.05, x.shape).astype(np.float32), tree)

    task = LanguageModelTask(Dataset(train=store), config, drawn(fixed) if rank else None)
    return task, drawn(own), (own, fixed)


def footprint(task, shapes, rows):
    """What memory follows from, with no optimizer."""
    batch = task.read("train", np.full(rows, -1))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return Footprint(task, *shapes, batch, state=[])


def most_of_a_device(name, mesh, rows, **options):
    """(bytes of the device that has most, at the moment when it does; what was said) of a sum."""
    shape = MeshShape.parse(mesh)
    task, params, shapes = problem(shape.devices, rows, **options)
    worker, most = ShardedWorker(task, shape), [0]

    def watched(program):
        known = {}

        def run(*arguments):
            key = str(jax.tree.map(np.shape, arguments))
            if key not in known:
                known[key] = program.lower(*arguments).compile().memory_analysis()
            found = known[key]
            new = found.output_size_in_bytes - found.alias_size_in_bytes
            most.append(max(live().values()) + found.temp_size_in_bytes + new)
            return program(*arguments)

        return run

    worker._run = {key: watched(program) for key, program in worker._run.items()}
    for key in ("_numbers", "_layer", "_whole", "_add_layer", "_add"):
        setattr(worker, key, watched(getattr(worker, key)))
    units = np.arange(shape.devices * rows).reshape(shape.devices, rows)
    before = max(live().values(), default=0)
    placed = worker.place(params)
    worker.lane_sum(0, placed, units, Clip(1.0), Strategy(name))
    said = footprint(task, shapes, rows).moments(Strategy(name), shape)
    of_sum = [need.total for moment, need in said.items() if moment not in AFTER]
    return max(most) - before, max(of_sum)


def live():
    """Bytes of each device's arrays; what two arrays share counts once."""
    found = {}
    for array in jax.live_arrays():
        for part in array.addressable_shards:
            own = found.setdefault(part.device, {})
            own[part.data.unsafe_buffer_pointer()] = part.data.nbytes
    return {device: sum(parts.values()) for device, parts in found.items()}
