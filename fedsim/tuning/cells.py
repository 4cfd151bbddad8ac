"""Ways of sampling, each with a kind of noise, compared at one epsilon: the one with the least.

What counts is the noise on sums of gradients, which is what parameters are (`noise.correlated`),
and what it costs: more gradients, or memory for rows of noise. All of it follows from what is
public.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

from fedsim import accounting
from fedsim.accounting import allocated_event
from fedsim.clipping import lattice_bits
from fedsim.config import (
    ALLOCATION,
    CORRELATED,
    CYCLIC,
    INDEPENDENT,
    POISSON,
    Algorithm,
    PrivacyConfig,
    RunConfig,
)
from fedsim.noise import Prediction, predicted_error, strategy
from fedsim.plan import allocated, bands_predicted
from fedsim.sampling import Users, graph_of
from fedsim.training import Noise, settled

ADDING = ("momentum", "sgd")
"""Optimizers that add gradients up, for which correlated noise is."""
MEMORY_SHARE = 1 / 4  # of this machine's, that rows of noise may take

MOST_GRADIENTS = 9 / 8  # of the batch size, of random allocation, for K divides the number of steps


@dataclasses.dataclass(frozen=True)
class Cell:
    """A way of sampling with a kind of noise, and what it costs and gains."""

    sampling: str
    noise: str
    bands: int | None
    participations: int | None
    batch_size: int
    """Gradients per step, expected at most."""
    noise_multiplier: float
    """sigma."""
    ratio: float
    """Noise on sums of mean gradients, in units of that of Poisson sampling with independent noise:
    root mean squares over the steps."""
    row_bytes: int
    """What the driver keeps of the noise of earlier steps."""
    against: str
    """Why it is not chosen, however little its noise; empty: it may be."""

    @property
    def changes(self) -> dict[str, Any]:
        """The settings of a PrivacyConfig that it takes, but for what is so by default."""
        if self.sampling == POISSON:
            return {}
        names = ("sampling", "noise", "bands", "participations", "batch_size")
        return {name: getattr(self, name) for name in names}


def compare(
    algorithm: Algorithm,
    privacy: PrivacyConfig,
    run: RunConfig,
    users: Users,
    num_parameters: int,
) -> list[Cell]:
    """What there is to choose from, Poisson sampling first; nothing where the choice is made:
    by the user, or because texts have several owners.

    Args: privacy: of `complete`.
    """
    chosen = privacy.sampling is not None or privacy.noise != INDEPENDENT
    if chosen or graph_of(users) is not None:
        return []
    assert privacy.delta is not None and privacy.group_size is not None, "complete() comes first"
    steps, group = privacy.num_steps, privacy.group_size if algorithm == Algorithm.ULS else 1
    poisson, *cyclic = bands_predicted(algorithm, privacy, users)

    def on_means(error: float, batch_size: int) -> float:
        """An error, which is in units of the sensitivity, in units of the mean of a step."""
        return error / (batch_size // group)

    def cell(found: Prediction, sampling: str, noise: str, **own: Any) -> Cell:
        settings = {"bands": None, "participations": None, "batch_size": privacy.batch_size, **own}
        usual = on_means(poisson.error, privacy.batch_size)
        ratio = on_means(found.error, settings["batch_size"]) / usual
        costs = {"row_bytes": 0, "against": "", **settings}
        return Cell(sampling, noise, noise_multiplier=found.noise_multiplier, ratio=ratio, **costs)

    cells = [cell(poisson, POISSON, INDEPENDENT)]
    if algorithm == Algorithm.ULS:
        settings = dataclasses.replace(privacy, sampling=ALLOCATION)
        settings = allocated(algorithm, settings, users.num_users)
        own = {"participations": settings.participations, "batch_size": settings.batch_size}
        if settings.batch_size > MOST_GRADIENTS * privacy.batch_size:
            own["against"] = "more gradients than the batch size"
        cells.append(cell(_of_allocation(settings), ALLOCATION, INDEPENDENT, **own))
    optimizer = settled(dataclasses.replace(run, learning_rate=1.0), Noise(1.0, 1.0, 1)).optimizer
    assert optimizer is not None, "it is settled"
    for each in cyclic:
        stddev = each.noise_multiplier * 2.0 ** lattice_bits(num_parameters)
        size = strategy(steps, each.bands, stddev).bytes_per_number * num_parameters
        against = ""
        if optimizer.partition(":")[0] not in ADDING:
            against = f"{optimizer} does not add gradients up"
        elif size > MEMORY_SHARE * _memory():
            against = "too much memory for this machine"
        own = {"bands": each.bands, "row_bytes": size, "against": against}
        cells.append(cell(each, CYCLIC, CORRELATED, **own))
    return cells


def _of_allocation(privacy: PrivacyConfig) -> Prediction:
    """Args: privacy: of `plan.allocated`."""
    steps, participations = privacy.num_steps, privacy.participations
    assert participations is not None and privacy.delta is not None
    sigma = accounting.calibrate_noise(
        functools.partial(allocated_event, window=steps // participations),
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        num_steps=steps,
    )
    return Prediction(1, sigma, predicted_error(sigma, steps, 1))


def least(cells: Sequence[Cell]) -> Cell:
    """The one with the least noise on sums of gradients, of those that may be chosen."""
    return min((each for each in cells if not each.against), key=lambda each: each.ratio)


def table(cells: Sequence[Cell]) -> list[str]:
    """The cells for people, a line each."""
    shape = "{:12}{:13}{:>6}{:>6}{:>9}{:>10}{:>11}{:>9}  {}".format
    head = ("sampling", "noise", "b", "K", "sigma", "on sums", "gradients", "MB")
    lines, chosen = [shape(*head, "").rstrip()], least(cells)
    for each in cells:
        numbers = f"{each.noise_multiplier:.4g}", f"{each.ratio:.3f}", f"{each.batch_size:,}"
        settings = str(each.bands or ""), str(each.participations or "")
        note = "least" if each is chosen else each.against
        size = f"{each.row_bytes / 1e6:.3g}"
        lines.append(shape(each.sampling, each.noise, *settings, *numbers, size, note).rstrip())
    return lines


def _memory() -> float:
    """Of this machine, in bytes."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
