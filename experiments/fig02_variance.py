"""Figures 2 and 9 (Section 3, Appendix B): noise variance per step of ELS and ULS.

(2a) Over G_ELS. (2b, 9) With M fixed and G_ULS = B / M: when the gradients of a user are aligned
(L_ULS = L_ELS), and when they are orthogonal (L_ULS = L_ELS / sqrt(G_ULS)). The text gives N, K, T,
delta, L_ELS and M = 16; the values of epsilon and the other M are ours.

    python -m experiments.fig02_variance --scale paper      (1 minute; smoke: 10 seconds)
"""

import dataclasses
import math

from matplotlib.figure import Figure

from experiments.harness import experiment, plots
from experiments.harness.rows import Row, Rows, by
from fedsim import accounting
from fedsim.tuning.estimates import noise_stddev


@dataclasses.dataclass(frozen=True)
class Settings:
    num_users: int = 1024
    examples_per_user: int = 32
    num_steps: int = 1000
    delta: float = 1e-6
    example_grad_norm: float = 10.0
    els_budget: int = 64
    epsilons: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    cohort_sizes: tuple[int, ...] = (16, 32, 64, 128)


SETTINGS = {
    "smoke": Settings(num_steps=200, epsilons=(1.0, 4.0), cohort_sizes=(16,)),
    "small": Settings(num_steps=200, cohort_sizes=(16, 64)),
    "paper": Settings(),
}


def run(settings: Settings) -> Rows:
    """Rows of panel 2a (varying G_ELS at a fixed budget) and of the grid 2b and 9 (varying B)."""
    groups = [2**power for power in range(settings.examples_per_user.bit_length())]
    rows = []
    for epsilon in settings.epsilons:
        for group in groups:
            rows.append(_row(settings, epsilon, settings.els_budget, els_group=group))
        for cohort in settings.cohort_sizes:
            for group in groups:
                rows.append(_row(settings, epsilon, cohort * group, uls_group=group, cohort=cohort))
    return rows


def els_variance(settings: Settings, epsilon: float, budget: int, group: int) -> float:
    """(sigma_ELS L_ELS / B)^2 with p = B / (G_ELS N): Equation 7, of clip norms at the Lipschitz
    constants. The variance of the gradient itself is not part of it.

    Raises: ConfigError: the budget exceeds the pool of G_ELS N examples.
    """
    sigma = sigma_of(settings, epsilon, budget / (group * settings.num_users), group)
    return noise_stddev(settings.example_grad_norm, sigma, budget) ** 2


def uls_variance(
    settings: Settings, epsilon: float, budget: int, group: int, user_grad_norm: float
) -> float:
    """(sigma_ULS L_ULS / M)^2 with M = B / G_ULS and q = M / N. Args: user_grad_norm: L_ULS, bound
    on the norm of the mean of a user's G_ULS gradients.

    Raises: ConfigError: the cohort exceeds the number of users.
    """
    cohort = budget / group
    sigma = sigma_of(settings, epsilon, cohort / settings.num_users, 1)
    return noise_stddev(user_grad_norm, sigma, cohort) ** 2


def sigma_of(settings: Settings, epsilon: float, prob: float, contributions: int) -> float:
    """The noise multiplier."""
    return accounting.noise_multiplier(
        epsilon=epsilon,
        delta=settings.delta,
        num_steps=settings.num_steps,
        sampling_prob=prob,
        max_contributions=contributions,
    )


def _row(
    settings: Settings,
    epsilon: float,
    budget: int,
    els_group: int | None = None,
    uls_group: int = 0,
    cohort: int = 0,
) -> Row:
    """Gradients of a user that all point one way have L_ULS = L_ELS, orthogonal ones L_ELS /
    sqrt(G_ULS)."""
    els_group = els_group or settings.examples_per_user
    row = {
        "epsilon": epsilon,
        "cohort_size": cohort or "",
        "budget": budget,
        "els_group_size": els_group,
        "uls_group_size": uls_group or "",
        "els": els_variance(settings, epsilon, budget, els_group),
        "uls_aligned": "",
        "uls_orthogonal": "",
    }
    if uls_group:
        norm, of_uls = settings.example_grad_norm, (settings, epsilon, budget, uls_group)
        row["uls_aligned"] = uls_variance(*of_uls, norm)
        row["uls_orthogonal"] = uls_variance(*of_uls, norm / math.sqrt(uls_group))
    return row


def plot(rows: Rows) -> Figure:
    kinds = by(rows, lambda row: bool(row["uls_group_size"]))
    grid, fixed_budget = kinds[True], kinds[False]
    epsilons = sorted({row["epsilon"] for row in rows})
    cohorts = sorted({row["cohort_size"] for row in grid})
    figure, axes = plots.panels(len(cohorts) + 1, len(epsilons), 2.6, 2.3, sharey="row")
    wide, narrow = {"lw": 4, "ms": 7, "alpha": 0.6}, {"lw": 1.3, "ms": 3.5}
    lines = (  # the wide one first: the next one may lie on it
        ("els", "ELS", "-o", "ELS", wide),
        ("uls_aligned", "ULS", "--o", "ULS, $L_{ULS} = L_{ELS}$", narrow),
        ("uls_orthogonal", "ULS", ":s", r"ULS, $L_{ULS} = L_{ELS}/\sqrt{G_{ULS}}$", narrow),
    )
    for column, epsilon in enumerate(epsilons):
        here = [row for row in fixed_budget if row["epsilon"] == epsilon]
        axis = axes[0, column]
        groups = [row["els_group_size"] for row in here]
        axis.plot(groups, [row["els"] for row in here], "-o", color=plots.COLOURS["ELS"])
        axis.set(yscale="log", xlabel="$G_{ELS}$")
        axis.set_title(rf"$\varepsilon$ = {epsilon:g}")
        for index, cohort in enumerate(cohorts):
            here = [r for r in grid if (r["epsilon"], r["cohort_size"]) == (epsilon, cohort)]
            axis = axes[index + 1, column]
            for key, algorithm, style, label, look in lines:
                own = {"color": plots.COLOURS[algorithm], "label": label, **look}
                budgets = [row["budget"] for row in here]
                axis.plot(budgets, [row[key] for row in here], style, **own)
            axis.set(yscale="log", xlabel="$B$")
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(f"noise variance, $B$ = {fixed_budget[0]['budget']}")
    for axis, cohort in zip(axes[1:, 0], cohorts, strict=True):
        axis.set_ylabel(f"noise variance, $M$ = {cohort}")
    handles = axes[1, 0].get_lines()
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    experiment.main(globals())
