"""Which ways of sampling go with which kinds of noise, and what is asked of each."""

from fedsim.errors import expect

POISSON, CYCLIC, SHUFFLE = "poisson", "cyclic", "shuffle"
COMPARISON_ONLY = "as if Poisson sampled: comparison only, not a guarantee"


def expect_cell(sampling: str, *, bands: int | None, num_steps: int | None) -> None:
    """Raises ConfigError: the settings do not go together, with the reason.

    Args: bands, num_steps: None where none are given.
    """
    if bands is not None:
        cyclic = sampling == CYCLIC
        expect("bands", bands, cyclic, f"none with {sampling} sampling: users are in no groups")
        expect("bands", bands, bands >= 1, ">= 1")
    if bands is not None and num_steps is not None:
        expect("bands", bands, bands <= num_steps, f"<= {num_steps}, the steps")
