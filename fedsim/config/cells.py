"""Which ways of sampling go with which kinds of noise, and what is asked of each."""

from fedsim.errors import expect

POISSON, CYCLIC, ALLOCATION, SHUFFLE = "poisson", "cyclic", "allocation", "shuffle"
ONLY_USERS = "poisson or cyclic with els: of several texts at random steps no tight bound is known"
INDEPENDENT, CORRELATED = "independent", "correlated"
COMPARISON_ONLY = "as if Poisson sampled: comparison only, not a guarantee"


def sampling_of(sampling: str | None, noise: str) -> str:
    """The way of sampling: the one that was asked for, or what goes with the noise."""
    return sampling or (CYCLIC if noise == CORRELATED else POISSON)


def expect_cell(
    sampling: str,
    noise: str,
    *,
    bands: int | None,
    participations: int | None,
    num_steps: int | None,
) -> None:
    """Raises ConfigError: the settings do not go together, with the reason.

    Args:
      sampling: of `sampling_of`.
      bands, participations, num_steps: None where none are given.
    """
    if noise == CORRELATED and sampling == ALLOCATION:
        why = f"{INDEPENDENT} with {ALLOCATION}: both together are bounded by Monte Carlo alone"
        expect("noise", noise, False, why)
    if noise == CORRELATED:
        unknown = "cyclic, or shuffle to compare: for users drawn in any step no bound is proven"
        expect("sampling", sampling, sampling in (CYCLIC, SHUFFLE), unknown)
    if participations is not None:
        expect("participations", participations, sampling == ALLOCATION, f"none with {sampling}")
        divides = participations >= 1 and (num_steps is None or num_steps % participations == 0)
        expect("participations", participations, divides, f"to divide num_steps={num_steps}")
    if bands is not None:
        grouped = sampling == CYCLIC or noise == CORRELATED
        expect("bands", bands, grouped, f"none with {sampling} sampling: users are in no groups")
        expect("bands", bands, bands >= 1, ">= 1")
    if bands is not None and num_steps is not None:
        expect("bands", bands, bands <= num_steps, f"<= {num_steps}, the steps")
