from .contributions import (
    Groups as Groups,
    Users as Users,
    examples_per_user as examples_per_user,
    graph_of as graph_of,
    groups_of as groups_of,
    law_of_median as law_of_median,
    limit_contributions as limit_contributions,
    median_group_size as median_group_size,
    owners_of as owners_of,
    places as places,
    pool_of as pool_of,
    private_median as private_median,
    rank_error as rank_error,
    too_few as too_few,
)
from .sampler import (
    PADDING as PADDING,
    Allocation as Allocation,
    Cyclic as Cyclic,
    Poisson as Poisson,
    Sampling as Sampling,
    draw_groups as draw_groups,
)
