"""How the devices of one worker are arranged."""

import dataclasses
import math

from fedsim.errors import expect

FSDP, TENSOR = AXES = ("fsdp", "tensor")
EXPECTED = (
    "fsdp:N and tensor:N with a comma between, N >= 1; lanes and workers compute side by side"
)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Devices as a grid that has one model: arrays are cut along one axis in `fsdp` parts, and
    along another one in `tensor` parts."""

    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """The shape that `fsdp:4` or `fsdp:4,tensor:2` names. Raises ConfigError: there is none."""
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = part.partition(":")
            known = axis in AXES and axis not in sizes
            expect("mesh", text, known and size.isdecimal() and int(size) > 0, EXPECTED)
            sizes[axis] = int(size)
        return cls(**sizes)

    def __str__(self) -> str:
        cut = f",tensor:{self.tensor}" if self.tensor > 1 else ""
        return f"fsdp:{self.fsdp}{cut}"

    @property
    def devices(self) -> int:
        """The number of devices in the mesh."""
        return math.prod(dataclasses.astuple(self))
