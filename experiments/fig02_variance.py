"""Figures 2 and 9 (Section 3, Appendix B): noise variance per step of ELS and ULS.

Claims: (2a) G_ELS has almost no effect on ELS. (2b, 9) With M fixed and G_ULS = B / M > 1: when the
gradients of a user are aligned (L_ULS = L_ELS), ELS is lower nearly everywhere; when they are
orthogonal (L_ULS = L_ELS / sqrt(G_ULS)), ULS is often lower, above all for small epsilon or large
B. The text gives N, K, T, delta, L_ELS and M = 16; the values of epsilon and the other M are ours.

    python -m experiments.fig02_variance --scale paper      (1 minute; smoke: 10 seconds)
"""

import dataclasses
from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments import common
from fedsim import variance
from fedsim.variance import Setting


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


def run(settings: Settings) -> list[dict]:
    """Rows of panel 2a (varying G_ELS at a fixed budget) and of the grid 2b and 9 (varying B)."""
    groups = _powers_of_two(settings.examples_per_user)
    rows = []
    for epsilon in settings.epsilons:
        for group in groups:
            rows.append(_row(settings, epsilon, settings.els_budget, els_group=group))
        for cohort in settings.cohort_sizes:
            for group in groups:
                rows.append(_row(settings, epsilon, cohort * group, uls_group=group, cohort=cohort))
    return rows


def _row(
    settings: Settings,
    epsilon: float,
    budget: int,
    els_group: int | None = None,
    uls_group: int = 0,
    cohort: int = 0,
) -> dict:
    setting = Setting(
        num_users=settings.num_users,
        num_steps=settings.num_steps,
        epsilon=epsilon,
        delta=settings.delta,
        example_grad_norm=settings.example_grad_norm,
    )
    els_group = els_group or settings.examples_per_user
    row = {
        "epsilon": epsilon,
        "cohort_size": cohort or "",
        "budget": budget,
        "els_group_size": els_group,
        "uls_group_size": uls_group or "",
        "els": variance.els_noise_variance(setting, budget=budget, group_size=els_group),
        "uls_aligned": "",
        "uls_orthogonal": "",
    }
    for key, grad_norm in (
        ("uls_aligned", variance.aligned_grad_norm),
        ("uls_orthogonal", variance.orthogonal_grad_norm),
    ):
        if uls_group:
            norm = grad_norm(settings.example_grad_norm, uls_group)
            row[key] = variance.uls_noise_variance(
                setting, budget=budget, group_size=uls_group, user_grad_norm=norm
            )
    return row


def plot(rows: Sequence[dict]) -> Figure:
    grid, fixed_budget = _grid(rows), _fixed_budget(rows)
    epsilons = sorted({row["epsilon"] for row in rows})
    cohorts = sorted({row["cohort_size"] for row in grid})
    figure, axes = plt.subplots(
        len(cohorts) + 1,
        len(epsilons),
        figsize=(2.6 * len(epsilons), 2.3 * (len(cohorts) + 1)),
        squeeze=False,
        layout="constrained",
    )
    lines = (
        ("els", "ELS", "-o", "ELS"),
        ("uls_aligned", "ULS", "-o", "ULS, $L_{ULS} = L_{ELS}$"),
        ("uls_orthogonal", "ULS", "--s", r"ULS, $L_{ULS} = L_{ELS}/\sqrt{G_{ULS}}$"),
    )
    for column, epsilon in enumerate(epsilons):
        here = [row for row in fixed_budget if row["epsilon"] == epsilon]
        axis = axes[0, column]
        groups = [row["els_group_size"] for row in here]
        axis.plot(groups, [row["els"] for row in here], "-o", color=common.COLOURS["ELS"])
        axis.set(ylim=(0, 1.2 * max(row["els"] for row in here)), xlabel="$G_{ELS}$")
        axis.set_title(rf"$\varepsilon$ = {epsilon:g}")
        for index, cohort in enumerate(cohorts):
            here = [r for r in grid if (r["epsilon"], r["cohort_size"]) == (epsilon, cohort)]
            axis = axes[index + 1, column]
            for key, algorithm, style, label in lines:
                colour, budgets = common.COLOURS[algorithm], [row["budget"] for row in here]
                axis.plot(budgets, [row[key] for row in here], style, color=colour, label=label)
            axis.set(yscale="log", xlabel="$B$")
            axis.yaxis.set_minor_formatter("")
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(f"noise variance, $B$ = {fixed_budget[0]['budget']}")
    for axis, cohort in zip(axes[1:, 0], cohorts, strict=True):
        axis.set_ylabel(f"noise variance, $M$ = {cohort}")
    handles = axes[1, 0].get_lines()
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def check(rows: Sequence[dict]) -> None:
    epsilons = sorted({row["epsilon"] for row in rows})
    for epsilon in epsilons:
        values = [row["els"] for row in _fixed_budget(rows) if row["epsilon"] == epsilon]
        assert max(values) < 1.2 * min(values), f"G_ELS matters at epsilon {epsilon}: {values}"
    grid = _grid(rows)
    # At G_ULS = 1, ULS is ELS with G_ELS = 1: the same but for what G_ELS does.
    lower = [row["els"] < row["uls_aligned"] for row in grid if row["uls_group_size"] > 1]
    assert sum(lower) >= 0.9 * len(lower), "aligned gradients: ELS is lower nearly everywhere"
    largest = max(row["uls_group_size"] for row in grid)
    for row in grid:
        if row["uls_group_size"] == largest:
            assert row["els"] <= row["uls_aligned"], "Conjecture 3.1 at maximal groups"
            if row["epsilon"] == epsilons[0]:
                assert row["uls_orthogonal"] < row["els"], "small epsilon, large B: ULS is lower"
    assert sum(row["uls_orthogonal"] < row["els"] for row in grid) > 0.5 * len(grid)


def _fixed_budget(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if not row["uls_group_size"]]


def _grid(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if row["uls_group_size"]]


def _powers_of_two(last: int) -> list[int]:
    return [2**power for power in range(last.bit_length())]


def main(argv: Sequence[str] | None = None) -> None:
    scale, out = common.parse_arguments(__doc__, argv)
    rows = run(SETTINGS[scale])
    common.write_csv(out / "fig02_variance.csv", rows)
    common.save_figure(plot(rows), out / "fig02_variance.png")
    check(rows)


if __name__ == "__main__":
    main()
