from .allocation import Allocation as Allocation
from .contributions import (
    PADDING as PADDING,
    Users as Users,
    draw_groups as draw_groups,
    examples_per_user as examples_per_user,
    graph_of as graph_of,
    groups_of as groups_of,
    limit_contributions as limit_contributions,
    owners_of as owners_of,
    places as places,
    pool_of as pool_of,
    without_padding as without_padding,
)
from .cyclic import Cyclic as Cyclic
from .poisson import Poisson as Poisson, Shuffle as Shuffle
from .sampler import Sampling as Sampling
from .shared import Groups as Groups
