"""How the devices of one worker are arranged."""

import dataclasses
import math

from fedsim.errors import expect

DATA, FSDP, TENSOR = AXES = ("data", "fsdp", "tensor")
LAYERED = ("layers", "twice")
"""Names of the strategies that go through a model layer by layer; see clipping/layered.py."""
EXPECTED = "data:N, fsdp:N and tensor:N with commas between, N >= 1"


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices as a grid: `data` groups, each of which has the whole model in fsdp * tensor parts:
    arrays are cut along one axis in `fsdp` parts, and along another one in `tensor` parts.

    All parts of a layer are gathered before it is computed. To multiply with some columns of a
    matrix, where they lie, would need less room; but a product of fewer columns may be added up in
    another order, so that a contribution would depend on the number of devices.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """The shape that `fsdp:4` or `data:2,fsdp:4,tensor:2` names. Raises ConfigError: there is
        none."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.partition(":")
            known = axis in AXES and axis not in sizes
            expect("mesh", text, known and size.isdecimal() and int(size) > 0, EXPECTED)
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        cut = f",tensor:{self.tensor}" if self.tensor > 1 else ""
        return f"data:{self.data},fsdp:{self.fsdp}{cut}"

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(dataclasses.astuple(self))
