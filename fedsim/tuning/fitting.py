"""On how many devices a model can be trained, and how: said before anything is computed.

The simplest way for which a device has room is chosen: the whole model on one device; else `layers`
on as few devices as have room between them, and `twice`, if that takes fewer. What a device needs
is in `engine.memory`. Beside the run's own model, models of 350 M, 1.7 B and 8 B parameters are
looked at, trained whole and by adapters, for rows of the run's length.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fedsim.clipping import Strategy
from fedsim.clipping.clip import lattice_bits, num_coordinates
from fedsim.config import Algorithm, MeshShape, RunConfig
from fedsim.config.cells import CORRELATED
from fedsim.config.mesh import LAYERED
from fedsim.engine.memory import Footprint, Need
from fedsim.errors import expect
from fedsim.models import lora
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.shapes import WELL_KNOWN, shapes_of
from fedsim.models.transformer import TransformerConfig
from fedsim.noise.correlated import strategy as correlated
from fedsim.noise.independent import released_dtype
from fedsim.optimizers import update_rule
from fedsim.placement import adds_up
from fedsim.recipe import Noise, settled
from fedsim.tuning.advice import Advice

USED = 0.9  # of a device: the rest is the platform's own
MOST_DEVICES = 64
RANK = 8  # of the adapters of models other than the run's
SHOWN = {
    "params": ("parameters", "frozen"),
    "state": ("optimizer",),
    "sums": ("sums",),
    "units": ("gradients", "weights", "activations"),
}
"""Columns of the table: parts of a `Need`."""
UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


@dataclasses.dataclass(frozen=True)
class Fit:
    """A model, a way to train it, and what that takes."""

    model: str
    num_parameters: int
    trained: int
    """How many of them: all, or those of the adapters."""
    lora_rank: int
    strategy: str
    mesh: str
    """The whole model on one device: data:1,fsdp:1."""
    devices: int
    fits: bool
    """False: a device has not enough room, however many there are of up to 64."""
    device_bytes: int
    """What each device needs: the sum of `parts`."""
    parts: dict[str, int]
    """What it needs for what; see `engine.memory.Need`."""
    noise_bytes: int
    """What the driver has of a step's release, and of noise of steps before."""


def bytes_of(text: str) -> int:
    """What `80GiB` stands for. Raises ConfigError: it is no amount of memory."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]+)", text)
    known = found is not None and found[2] in UNITS and float(found[1]) > 0
    expect("device_memory", text, known, f"a number above 0 and {' or '.join(UNITS)}, as in 80GiB")
    assert found is not None
    return int(float(found[1]) * UNITS[found[2]])


def fits(
    run: RunConfig, task: LanguageModelTask, advice: Advice, num_steps: int, room: int
) -> list[Fit]:
    """The run's model and the well-known ones, each with the one or two ways to train it.

    Args:
      advice: whose group size and whose noise are taken.
      num_steps: T.
      room: bytes of a device.
    """
    own, data = task.config, task.dataset
    models = [(run.model.source, own)]
    for name, fields in WELL_KNOWN.items():
        alike = {"max_length": own.max_length, "dtype": own.dtype, "remat": own.remat}
        other = TransformerConfig(**{**alike, **fields})
        models += [(name, other), (name, lora.adapted(other, RANK, lora.SCALE * RANK, "all"))]
    group = advice.group_size if advice.algorithm == Algorithm.ULS else 1
    known = settled(run, Noise(1.0, 1.0, num_steps))
    rule, found = update_rule(known, 1.0), []
    for name, config in models:
        trained, frozen = shapes_of(config)
        each = LanguageModelTask(data, config, frozen if config.lora else None)
        rows = jax.tree.map(_shape, each.read("train", np.full(group, -1)))
        state = jax.eval_shape(rule.init, trained)
        footprint = Footprint(each, trained, frozen, rows, [state, [trained] * bool(known.ema)])
        # An optimizer that adds up over an array takes no parts of it.
        most = 1 if adds_up(rule.update, trained, state, trained) else MOST_DEVICES
        count = num_coordinates(trained)
        for strategy, mesh, need in _ways(footprint, most, int(USED * room)):
            fit = Fit(
                model=name,
                num_parameters=num_coordinates(frozen) or count,
                trained=count,
                lora_rank=config.lora.rank if config.lora else 0,
                strategy=str(strategy),
                mesh=str(mesh),
                devices=mesh.devices,
                fits=need.total <= USED * room,
                device_bytes=need.total,
                parts=dataclasses.asdict(need),
                noise_bytes=count * _bytes_of_noise(advice, num_steps, count),
            )
            found.append(fit)
    return found


def table(found: Sequence[Mapping[str, Any]], room: int) -> list[str]:
    """The ways for people, a line each. Args: found: fields of `Fit`s."""
    shape = "{:10}{:>6}{:>5} {:9}{:>7}{:>7}{:>7}{:>7}{:>7}{:>7}{:>7}".format
    lines = [
        f"GiB of each device, of {room / 2**30:.3g}, {USED:.0%} of which are used; noise is on the "
        "driver",
        shape("model", "M", "LoRA", "", "devices", *SHOWN, "all", "noise"),
    ]
    for each in found:
        parts = (sum(each["parts"][name] for name in names) for names in SHOWN.values())
        sizes = *parts, each["device_bytes"], each["noise_bytes"]
        devices = str(each["devices"]) if each["fits"] else "none"
        count, rank = f"{each['num_parameters'] / 1e6:.0f}", each["lora_rank"] or ""
        shown = (f"{size / 2**30:.2f}" for size in sizes)
        lines.append(shape(each["model"][-10:], count, rank, each["strategy"], devices, *shown))
    return lines


def _ways(footprint: Footprint, most: int, room: int) -> list[tuple[Strategy, MeshShape, Need]]:
    """The simplest way that fits; of the strategies for meshes both, where one takes fewer devices;
    and if nothing fits, what needs least."""

    def way(strategy, devices):
        mesh = MeshShape(fsdp=devices)
        return strategy, mesh, footprint.need(strategy, mesh)

    def first(name):
        ways = [way(Strategy(name), 2**n) for n in range(most.bit_length())]
        return next((each for each in ways if each[2].total <= room), ways[-1])

    group = len(jax.tree.leaves(footprint.rows)[0])
    direct = way(Strategy("direct", group), 1)
    if direct[2].total <= room:
        return [direct]
    layers, twice = map(first, LAYERED)
    if layers[2].total > room:
        return [twice]
    return [layers] if layers[1] == twice[1] else [layers, twice]


def _bytes_of_noise(advice: Advice, num_steps: int, num_trained: int) -> int:
    """Of each number that is trained: of the release, and of rows of the noise of steps before."""
    stddev = advice.noise_multiplier * 2.0 ** lattice_bits(num_trained)
    if advice.noise != CORRELATED:
        return released_dtype(stddev).itemsize
    assert advice.bands is not None
    return 8 + correlated(num_steps, advice.bands, stddev).bytes_per_number


def _shape(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
