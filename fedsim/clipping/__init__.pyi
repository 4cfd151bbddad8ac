from .contribution import (
    ROUNDING as ROUNDING,
    Clip as Clip,
    lattice_bits as lattice_bits,
    lattice_capacity as lattice_capacity,
    num_coordinates as num_coordinates,
    zeros_like as zeros_like,
)
from .ghost import (
    UnsupportedModel as UnsupportedModel,
    layers_are_recorded as layers_are_recorded,
)
from .packing import (
    SHORT as SHORT,
    Buckets as Buckets,
    Chunk as Chunk,
    chunks as chunks,
    chunks_of_shared as chunks_of_shared,
    in_shared_rows as in_shared_rows,
    packed as packed,
    shared_lengths as shared_lengths,
)
from .strategy import (
    AUTO as AUTO,
    MANY_PARAMETERS as MANY_PARAMETERS,
    NAMES as NAMES,
    Strategy as Strategy,
    by_rule as by_rule,
    clip_chunk as clip_chunk,
    in_parts as in_parts,
)
