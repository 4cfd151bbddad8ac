"""How the devices of one worker are arranged."""

import dataclasses
import math

from fedsim.errors import expect

LAYERED = ("layers", "twice")
"""Names of the strategies that go through a model layer by layer; see clipping/layered.py."""
EXPECTED = "data:N, fsdp:N or data:N,fsdp:N, with N >= 1"


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices as a grid: `data` groups, each of which has the whole model in `fsdp` parts."""

    data: int = 1
    fsdp: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """The shape that `fsdp:4` or `data:2,fsdp:4` names. Raises ConfigError: there is none."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.partition(":")
            # A layer's products would be added up in parts: in another order, with other bits.
            why = "; over tensor, a contribution would depend on the number of devices"
            expected = EXPECTED + (why if axis == "tensor" else "")
            known = axis in ("data", "fsdp") and axis not in sizes
            expect("mesh", text, known and size.isdecimal() and int(size) > 0, expected)
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        return f"data:{self.data},fsdp:{self.fsdp}"

    @property
    def devices(self) -> int:
        """How many there are."""
        return math.prod(dataclasses.astuple(self))
