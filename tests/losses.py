"""Privacy losses in both directions at once, as the accountant's parts give them one by one."""

from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from fedsim.accounting import composition, mixture

WAYS = (composition.REMOVE, composition.ADD)


def one_step(mix, grid):
    """The loss of one step."""
    return PrivacyLossDistribution(*(mixture.one_step_pmf(mix, grid, way) for way in WAYS))


def compose(steps):
    """The loss of all steps together, each repeated its number of times."""
    halves = [[(composition.directions(pld)[way], count) for pld, count in steps] for way in WAYS]
    return PrivacyLossDistribution(*map(composition.compose_pmfs, halves))


def epsilon_at(pld, delta):
    """The larger epsilon of both directions."""
    return max(composition.pmf_epsilon_at(pmf, delta) for pmf in composition.directions(pld))
