"""What the experiments say of their claims: made-up rows that keep them, and rows that do not."""

import importlib
import itertools
import re
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

from experiments import (
    fig06_privacy_loss,
    fig18_personalization,
    real_model_claims,
    real_model_rates,
    regime_claims,
    regime_plots,
    sampling,
    table_pretraining,
)
from experiments.harness import records
from experiments.harness.rows import by
from experiments.harness.verdicts import NOT_SHOWN
from fedsim import accounting
from fedsim.accounting import StepEvent

CELL = {"seeds": 2, "loss_std": 0.001, "loss_before": 5.0}


def verdicts(name, rows):
    """The verdict on each claim of an experiment."""
    found = importlib.import_module(f"experiments.{name}").check(rows)
    return [records.verdict(held) for _, held, _ in found]


def heat_map(loss):
    """Rows of Figure 5 for loss(G, M)."""
    pairs = itertools.product((1, 2, 4, 8), (16, 32, 64, 128))
    return [
        {
            **{**CELL, "epsilon": 4.0, "budget": group * cohort},
            **{"group_size": group, "cohort_size": cohort, "loss": loss(group, cohort)},
        }
        for group, cohort in pairs
    ]


def test_figure_5_asks_where_the_best_is():
    assert verdicts("fig05_uls_heatmap", heat_map(lambda g, m: 4 - 0.01 * m)) == [True] * 3
    up_to_32 = heat_map(lambda g, m: 4 - 0.01 * min(m, 32) - 0.005 * g)
    assert verdicts("fig05_uls_heatmap", up_to_32) == [False, False, True]
    groups_first = heat_map(lambda g, m: 4 - 0.1 * g)
    assert verdicts("fig05_uls_heatmap", groups_first) == [False, False, True]
    worse = heat_map(lambda g, m: 6 - 0.01 * m)
    assert verdicts("fig05_uls_heatmap", worse)[2] is False


def test_figure_5_does_not_judge_what_seeds_explain():
    rows = heat_map(lambda g, m: 4 - 0.0001 * g)
    assert verdicts("fig05_uls_heatmap", rows) == [True, NOT_SHOWN, True]
    noisy = [{**row, "loss_std": 0.01} for row in rows]
    assert verdicts("fig05_uls_heatmap", noisy)[:2] == [NOT_SHOWN, NOT_SHOWN]
    cohorts = heat_map(lambda g, m: 4 - 0.0001 * m)
    assert verdicts("fig05_uls_heatmap", cohorts)[1] == NOT_SHOWN
    assert verdicts("fig05_uls_heatmap", [{**row, "loss_std": 0.0} for row in cohorts])[1] is True


def test_figure_5_compares_the_configurations_that_the_paper_names():
    def rows(loss):
        return [
            {**CELL, "epsilon": 4.0, "budget": 2**18, "group_size": g, "cohort_size": m, "loss": x}
            for g, m, x in ((64, 4096, 4.0), (256, 1024, loss))
        ]

    assert [verdicts("fig05_uls_heatmap", rows(x))[3] for x in (4.1, 4.001)] == [*(True, NOT_SHOWN)]


@pytest.mark.parametrize(
    "loss, holds", [(4.0, True), (4.09, True), (4.1, NOT_SHOWN), (4.11, False)]
)
def test_figure_4_allows_the_median_a_tenth_of_the_gain(loss, holds):
    where = {**CELL, "dataset": "d", "epsilon": 4.0, "budget": 16, "median_examples": 8}
    rows = [
        {**where, "group_size": group, "loss": value}
        for group, value in ((1, 4.0), (8, loss), (64, 4.5))
    ]
    assert verdicts("fig04_els_group_size", rows) == [holds]


@pytest.mark.parametrize("ours, holds", [(0.0, [True, True]), (0.05, [False, True])])
def test_figure_14_holds_ours_against_the_oracle_and_chance(ours, holds):
    rows = [
        {
            **{"dataset": "d", "epsilon": epsilon, "budget": budget, "seed_error": 0.001},
            **{"strategy": strategy, "suboptimality": value},
        }
        for epsilon in (1.0, 4.0)
        for budget in (32, 64, 128)
        for strategy, value in (
            ("estimate-and-double", ours),
            ("greedy local oracle", 0.0),
            ("random", 0.1),
        )
    ]
    assert verdicts("fig14_tuner_suboptimality", rows) == holds


def trade_off(els, uls, local=4.0, name="Stack Overflow"):
    """Rows of Figure 6 for els(budget, epsilon) and uls(budget, epsilon)."""
    return [
        {
            **{**CELL, "dataset": name, "epsilon": epsilon, "budget": budget},
            **{"algorithm": algorithm, "local_steps": steps, "loss": loss, "group_size": 1},
        }
        for epsilon in (1.0, 4.0)
        for budget in (32, 128, 512)
        for algorithm, steps, loss in (
            ("els", 1, els(budget, epsilon)),
            ("uls", 1, uls(budget, epsilon)),
            ("uls", 4, local),
        )
    ]


def test_figure_6_compares_beyond_what_seeds_explain():
    rows = trade_off(lambda b, e: 4.5, lambda b, e: 4.4 - b / 1000 - 0.05 / e, local=3.8)
    assert verdicts("fig06_privacy_loss", rows) == [True] * 5
    rows = trade_off(lambda b, e: 4.5 - b / 1000, lambda b, e: 4.6)
    assert verdicts("fig06_privacy_loss", rows) == [False, NOT_SHOWN, False, True, True]
    rows = trade_off(lambda b, e: 4.5, lambda b, e: 4.501)  # nothing that seeds do not explain
    assert verdicts("fig06_privacy_loss", rows)[:3] == [True, NOT_SHOWN, NOT_SHOWN]
    noisy = [{**row, "loss_std": 0.01} for row in rows]
    assert verdicts("fig06_privacy_loss", noisy)[:3] == [NOT_SHOWN] * 3
    rows = trade_off(lambda b, e: 5.5, lambda b, e: 4.5, local=4.6)
    assert verdicts("fig06_privacy_loss", rows) == [True, NOT_SHOWN, NOT_SHOWN, False, False]
    other_way = trade_off(lambda b, e: 4.5, lambda b, e: 4.4 - (e - 2) * b / 1000)
    assert verdicts("fig06_privacy_loss", other_way)[2] is False  # more on average, not at each
    one = trade_off(lambda b, e: 4.5, lambda b, e: 4.4 - (b == 512) / e)
    assert verdicts("fig06_privacy_loss", one)[1] == NOT_SHOWN  # ahead the most at one budget
    one = trade_off(lambda b, e: 4.5, lambda b, e: 4.4 - (b == 512) / e + (b == 32) / e / 2)
    assert verdicts("fig06_privacy_loss", one)[1] is False


def test_figure_6_draws_training_without_noise_and_does_not_judge_it():
    rows = trade_off(lambda b, e: 4.5, lambda b, e: 4.4 - b / 1000 - 0.05 / e, local=3.8)
    bounds = [{**row, "epsilon": np.inf, "loss": 1.0} for row in rows if row["epsilon"] == 4.0]
    assert verdicts("fig06_privacy_loss", rows + bounds) == verdicts("fig06_privacy_loss", rows)
    plain = [row for row in rows if row["epsilon"] == 4.0]
    assert [row["epsilon"] for row in fig06_privacy_loss.without_noise(rows)] == [np.inf] * len(
        plain
    )
    for along, drawn in (("epsilon", 3), ("budget", 0)):
        across = {"epsilon": "budget", "budget": "epsilon"}[along]
        figure = fig06_privacy_loss.plot(rows + bounds, along, across)
        labels = [axis.get_legend_handles_labels()[1] for axis in figure.axes]
        assert all(sum("without noise" in label for label in own) == drawn for own in labels)
        plt.close(figure)


def test_figure_6_judges_the_median_user_s_group_and_says_what_the_best_one_changes():
    rows = trade_off(lambda b, e: 4.5, lambda b, e: 4.4 - b / 1000 - 0.05 / e, local=3.8)
    found = fig06_privacy_loss.with_other_groups(rows, (1, 8))
    assert {(row["algorithm"], row["group_size"]) for row in found} == {("els", 8)}
    assert len(found) == 6 and not fig06_privacy_loss.best_els(rows)

    def judged(loss):
        others = [{**row, "loss": loss, "other_group": True} for row in found]
        held = fig06_privacy_loss.check([*rows, *others])
        plt.close(fig06_privacy_loss.plot([*rows, *others]))
        return [bool(each) for what, each, _ in held if "best of 2 groups" in what], len(held)

    assert judged(4.6) == ([True], 6)
    assert judged(4.3) == ([False], 6)  # ahead of ULS where its budget is small
    others = [{**row, "loss": 0.0, "other_group": True} for row in found]
    changed = verdicts("fig06_privacy_loss", [*rows, *others])
    assert [held for n, held in enumerate(changed) if n != 4] == verdicts(
        "fig06_privacy_loss", rows
    )


def test_figure_8_compares_gains():
    def rows(els, uls):
        return [
            {
                **CELL,
                "times": times,
                "budget": budget,
                "algorithm": name,
                "loss": loss(times, budget),
            }
            for times in (1, 10, 100)
            for budget in (32, 128, 512)
            for name, loss in (("els", els), ("uls", uls))
        ]

    as_claimed = rows(lambda t, b: 4.5 - t / 1000, lambda t, b: 4.5 - b / 1000)
    assert verdicts("fig08_num_users", as_claimed) == [True, True]
    alike = rows(lambda t, b: 4.5 - b / 1000, lambda t, b: 4.5 - b / 1000)
    assert verdicts("fig08_num_users", alike) == [NOT_SHOWN, NOT_SHOWN]


@pytest.mark.parametrize(
    "more, after, holds",
    [
        (0.01, 0.11, [True] * 5),
        (0.0145, 0.11, [True, NOT_SHOWN, True, True, True]),  # alike but for its error
        (0.2, -0.1, [True, False, False, True, False]),
        (0.2, -0.001, [True, False, True, True, NOT_SHOWN]),
        (-0.2, -0.1, [True, False, False, False, False]),
    ],
)
def test_figure_18_compares_the_same_users(more, after, holds):
    came = {"gain": 0.3, "ahead": 0.1, "more_gain": more, "ahead_after": after}
    noise = {f"{name}_{of}": 0.001 for name in came for of in ("error", "std")}
    where = {"epsilon": 4.0, "budget": 32, "seeds": 2, "personalized_loss": 4.0, **noise, **came}
    rows = [{**where, "algorithm": name} for name in ("els", "uls")]
    assert verdicts("fig18_personalization", rows) == holds


def test_figure_18_tells_the_spread_over_users_from_that_over_seeds():
    values = np.array([[0.0, 2.0], [4.0, 6.0]])  # means over seeds 2, 4; over users 1, 5
    found = fig18_personalization.estimates({"gain": values})
    assert found["gain"] == 3 and found["gain_error"] == pytest.approx(1.0)
    assert found["gain_std"] == pytest.approx(np.sqrt(8))
    row = {**found, "seeds": 2}
    assert fig18_personalization.error(row, "gain", [row]) == pytest.approx(np.sqrt(1 + 4))


def shuffled(algorithm, steps, group_size=1, kind="shuffle"):
    """A plan of 10 steps in an epoch."""
    units = {"num_units": 100, "expected_count": 10, "accounted_prob": 0.1}
    noise = {"noise_multiplier": 4.0, "delta": 1e-6, "num_steps": steps}
    who = {"algorithm": algorithm, "group_size": group_size}
    return SimpleNamespace(**units, **noise, **who, sampling=SimpleNamespace(kind=kind))


def test_shuffling_may_claim_what_one_gaussian_release_an_epoch_has():
    def gaussian(sigma, times):
        return accounting.epsilon([(StepEvent(sigma, 1.0), times)], 1e-6)

    claimed = sampling.claimed_epsilon
    assert claimed(shuffled("uls", 1)) == claimed(shuffled("uls", 10)) == gaussian(4.0, 1)
    assert claimed(shuffled("uls", 11)) == claimed(shuffled("uls", 20)) == gaussian(4.0, 2)
    # All of a user's examples may fall into one batch.
    assert claimed(shuffled("els", 10, group_size=2)) == gaussian(2.0, 1)
    assert claimed(shuffled("uls", 10, group_size=2)) == gaussian(4.0, 1)
    poisson = shuffled("els", 10, 2, "poisson")
    event = StepEvent(4.0, 0.1, 2)
    assert claimed(poisson) == accounting.epsilon([(event, 10)], 1e-6) < gaussian(2.0, 1)


def regime(loss, seeds=2, users=(regime_claims.ALL, regime_claims.FEW)):
    """Trainings of the paper's regime for loss(data, algorithm, epsilon, group, budget, times)."""
    groups = {"els": {1, 8, 154, 308}, "uls": {1, 4, 16}}
    main = [(1, 512, seed) for seed in range(seeds)]
    more = [
        (times, budget, seed) for times in (1, 100) for budget in (64, 512) for seed in range(6)
    ]
    return [
        {
            **{"data": data, "algorithm": algorithm, "epsilon": epsilon, "group_size": group},
            **{"budget": budget, "times": times, "seed": seed, "counts": True},
            **{"median_examples": 154, "num_parameters": 1_055_488},
            **{"heuristic_group_size": 1 if data == regime_claims.ALL else 16, "planned": 128},
            "expected_count": budget if algorithm == "els" else budget // group,
            "loss_before": 5.0,
            "loss": loss(data, algorithm, epsilon, group, budget, times) + 1e-4 * seed,
        }
        for data in users
        for algorithm, sizes in groups.items()
        for epsilon in (4.0, 1.0)
        for group in sizes
        for times, budget, seed in (*main, *(more if data == users[0] and epsilon == 4 else ()))
    ]


def regime_verdicts(rows):
    found = regime_claims.check(rows)
    return {what: held for what, held, _ in found if "added after" not in what}


def as_the_paper_says(data, algorithm, epsilon, group, budget, times):
    if algorithm == "els":
        worse = 0.1 * abs(np.log2(group / 154)) / 7
        return 4.6 + worse + 0.2 / epsilon - times / 1000 - budget / 1e5
    worse = 0.05 * abs(np.log2(group)) if data == regime_claims.ALL else 0.2 / group
    return 4.5 + worse + 0.1 / epsilon - budget / 1000


def test_the_regime_judges_each_claim_of_the_paper():
    rows = [row for row in regime(as_the_paper_says) if row["seed"] < 6]
    held = regime_verdicts(rows)
    assert held.pop("ours: all trainings were run") is False
    assert set(held.values()) == {True} and len(held) == 15
    opposite = regime_verdicts(regime(lambda d, *at: 9.5 - as_the_paper_says(d, *at)))
    assert not any(records.verdict(held) is True for held in opposite.values())


@pytest.mark.slow
@pytest.mark.ci
def test_a_training_that_comes_to_no_number_is_the_worst_and_decides_nothing_else():
    def loss(algorithm, epsilon, group):
        return 4.8 + 0.1 / epsilon

    rows = real_model(loss, lambda epsilon: 0.6)
    lost = [{**row, "loss": np.nan} if row["group"] == 16 else row for row in rows]
    judged = [[held for _, held, _ in real_model_claims.check(each)] for each in (rows, lost)]
    assert judged[0] == judged[1]
    plt.close(real_model_claims.plot(lost))


def test_pairs_of_seeds_leave_out_what_moves_all_cells_alike():
    rng = np.random.default_rng(0)
    rows = regime(as_the_paper_says, users=(regime_claims.FEW,))

    def said(by_seed, own):
        noisy = [
            {**row, "loss": row["loss"] + by_seed * row["seed"] + rng.normal(0, own)}
            for row in rows
        ]
        (found,) = [
            found
            for found in regime_claims.check(noisy)
            if "Figure 4" in found[0] and "few" in found[0]
        ]
        return records.verdict(found[1]), float(found[2].split()[-1])

    assert said(0.1, 0.0) == (True, 0.0)
    held, error = said(0.1, 0.03)
    assert held == NOT_SHOWN and 0.015 < error < 0.06  # of a difference of means of two: 0.03


def test_gains_from_compute_and_users_are_told_by_pairs_of_seeds_beside_the_verdicts():
    rng = np.random.default_rng(0)
    rows = [row for row in regime(as_the_paper_says) if row["data"] == regime_claims.ALL]
    shift = rng.normal(0, 0.1, 6)
    rows = [{**row, "loss": row["loss"] + shift[row["seed"]]} for row in rows]
    where = ("1 times the users", "100 times the users", "B = 64", "B = 512")

    def said(rows):
        *_, (what, held, numbers) = regime_claims.check(rows)
        assert held is None and "pairs of seeds" in what
        found = re.findall(r"(ULS|ELS) by (\S+) with (.+?) \((\S+)\)", numbers)
        assert [place for _, _, place, _ in found] == list(where)
        return [(float(gain), float(error)) for _, gain, _, error in found]

    gains = 448 / 1000 - 448 / 1e5, 99 / 1000
    expected = [(round(gain, 4), 0.0) for gain in gains for _ in range(2)]
    assert said(rows) == expected
    noisy = [{**row, "loss": row["loss"] + rng.normal(0, 0.01)} for row in rows]
    for (gain, error), (true, _) in zip(said(noisy), expected, strict=True):
        assert 0.008 < error < 0.05 and abs(gain - true) < 2 * error  # of six: 0.024


def test_the_regime_judges_nothing_before_all_cells_of_a_claim_have_their_seeds():
    one_seed = [row for row in regime(as_the_paper_says) if row["seed"] < 1]
    no_other = [row for row in regime(as_the_paper_says) if row["group_size"] != 308]
    for rows, judged in ((one_seed, 0), (no_other, 8)):
        held = regime_verdicts(rows)
        assert sum(verdict is not None for what, verdict in held.items() if "ours" not in what) == (
            judged
        )


def test_a_seed_that_not_all_compared_cells_have_moves_none_of_them():
    rows = regime(as_the_paper_says, seeds=2)
    rows = [row for row in rows if row["seed"] < 2]
    cell = {"data": regime_claims.ALL, "algorithm": "els", "group_size": 154, "epsilon": 4.0}
    cell |= {"budget": 512, "times": 1}
    (other,) = [row for row in rows if {**cell, "seed": 1}.items() <= row.items()][:1]
    more = [*rows, {**other, "seed": 4, "loss": 9.0}]
    found = [{n: (h, numbers) for n, h, numbers in regime_claims.check(r)} for r in (rows, more)]
    changed = {n for n in found[0] if found[0][n] != found[1][n]}
    assert all("ours" in name for name in changed)


def test_the_regime_is_drawn_with_whatever_there_is():
    every = regime(as_the_paper_says)
    for rows in (every, every[:1], [row for row in every if row["algorithm"] == "uls"]):
        for plot in regime_plots.FIGURES.values():
            plt.close(plot(rows))


def real_model(loss, area, seeds=2):
    """Trainings of a real model for loss(algorithm, epsilon, group) and area(epsilon)."""
    groups = {"els": (-1, 1), "uls": (1, 4, 16)}
    return [
        {
            **{"source": source, "rank": 8, "algorithm": algorithm, "epsilon": epsilon},
            **{"group": group, "group_size": 30 if group < 0 else group, "seed": seed},
            **{"planned": 84, "loss_before": 5.0, "auc": area(epsilon), "delta": 1e-3},
            **{"num_users": 700, "expected_count": 32 // abs(group), "num_steps": 40},
            "noise_multiplier": 1.14 if epsilon == 1 else 0.5 if epsilon == 8 else 0.0,
            **{"auc_low": area(epsilon) - 0.06, "auc_high": area(epsilon) + 0.06},
            "loss": loss(algorithm, epsilon, group) + 1e-4 * seed,
        }
        for source in real_model_claims.SOURCES
        for algorithm, sizes in groups.items()
        for epsilon in real_model_claims.EPSILONS
        for group in sizes
        for seed in range(seeds)
    ]


def test_a_real_model_is_judged_by_loss_and_attack():
    def judged(*args, **options):
        claims = real_model_claims.check(real_model(*args, **options))
        added = ("ours", "added after")
        return [
            records.verdict(held)
            for what, held, _ in claims
            if not any(each in what for each in added)
        ]

    def good(algorithm, epsilon, group):
        return 4.8 + 0.1 / epsilon - 0.01 * (algorithm == "uls")

    def seen(epsilon):
        return 0.7 if np.isinf(epsilon) else 0.48

    assert judged(good, seen) == [True] * 12
    assert judged(good, seen, seeds=1) == [None] * 12
    assert judged(lambda *at: 4.95, seen) == [False, True, True, True, True, True] * 2
    assert judged(lambda *at: 5.1, seen)[:3] == [False] * 3
    worse = judged(lambda a, e, g: good(a, e, g) + 0.1 * (a == "uls"), seen)
    assert worse[3] is False
    assert judged(good, lambda epsilon: 0.48)[4:6] == [False, True]
    assert judged(good, lambda epsilon: 0.52)[4:6] == [NOT_SHOWN, NOT_SHOWN]
    assert judged(good, lambda epsilon: 0.7)[4:6] == [True, False]
    for rows in (real_model(good, seen), real_model(good, seen)[:1]):
        for plot in real_model_claims.FIGURES.values():
            plt.close(plot(rows))


def test_what_is_reported_of_a_real_model_compares_trainings_that_are_alike():
    def loss(algorithm, epsilon, group):
        return 4.8 + 0.1 / epsilon - 0.01 * (algorithm == "uls") + 0.02 * (group < 0)

    rows = real_model(loss, lambda epsilon: 0.5 + 0.25 / (1 + epsilon), seeds=2)
    lower = [row for row in rows if row["group"] == 1 and row["epsilon"] == 8.0]
    rows += [{**row, "rank": 32, "loss": row["loss"] - 0.05} for row in lower]
    found = {what: numbers for what, held, numbers in real_model_claims.check(rows) if held is None}
    said = {
        name: found[f"scotus, added after the runs: {name}"] for name in real_model_claims.REPORTS
    }
    attack, allowed, median, rank = said.values()
    assert allowed.startswith("0.58") and allowed.count("with G") == 6
    assert attack.startswith("-0.1250 on average (-0.1250 to -0.1250) in 8 pairs without G = 16")
    assert median == "ahead by 0.0300 at 8, 0.0300 at 1"
    assert rank == "by 0.0500 on average (0.0500 to 0.0500) in 4 pairs at 8"
    alone = real_model_claims.check([row for row in rows if row["rank"] == 8])
    assert not any("rank 32" in what for what, *_ in alone)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
def test_no_attack_that_noise_allows_has_a_larger_area(sigma):
    """Two normals a distance of 1 / sigma apart, if all users are in every step; and less if they
    are not always in."""
    area = real_model_claims.largest_area(sigma, 1.0, 1)
    assert area == pytest.approx(stats.norm.cdf(1 / sigma / np.sqrt(2)), abs=2e-4)
    assert 0.5 <= real_model_claims.largest_area(sigma, 0.1, 1) < area
    assert real_model_claims.largest_area(sigma, 1.0, 4) == pytest.approx(
        real_model_claims.largest_area(sigma / 2, 1.0, 1), abs=2e-4
    )


def test_the_interval_of_an_attack_holds_its_area():
    """Two normals a distance apart, whose area is known; and scores that many users share."""
    rng, truth, times = np.random.default_rng(0), stats.norm.cdf(1 / np.sqrt(2)), 300
    held = 0
    for _ in range(times):
        area, low, high = real_model_claims.interval(rng.normal(1, 1, 60), rng.normal(0, 1, 80))
        assert low <= area <= high
        held += low <= truth <= high
    assert abs(held / times - 0.95) < 4 * np.sqrt(0.95 * 0.05 / times)
    inside, outside = rng.integers(0, 4, 30).astype(float), rng.integers(0, 4, 40).astype(float)
    area = real_model_claims.interval(inside, outside)[0]
    assert area == pytest.approx(stats.mannwhitneyu(inside, outside).statistic / (30 * 40))


def fine_tuned(losses, seed=0, algorithm="uls", group=1):
    """Rows of table_pretraining with these losses, by how far the rate is from the rule's."""
    cell = {"seed": seed, "algorithm": algorithm, "group": group, "group_size": group}
    cell |= {"seeds_planned": 3, "loss_untrained": 10.0, "loss_before": 6.0}
    return [
        {**cell, "power": power, "loss": loss, "learning_rate": 0.01 * 3.0**power}
        for power, loss in losses.items()
    ]


@pytest.mark.parametrize(
    "losses, more",
    [
        ({-1: 5.9, 0: 5.8, 1: 5.9}, set()),
        ({-1: 5.9, 0: 5.8, 1: 5.7}, {2}),
        ({-2: 5.7, -1: 5.6, 0: 5.8, 1: 9.9}, set()),
        ({-1: 5.9, 0: 5.8, 1: 5.7, 2: 5.6, 3: 5.5}, set()),  # as far as it goes
        ({-1: 5.9, 0: np.nan, 1: np.inf}, {-2}),
    ],
)
def test_rates_are_tried_until_the_best_is_not_at_the_edge(losses, more):
    settings = table_pretraining.Settings(*("", 1, 1, 1, 1, 1, 1), groups=(("uls", 1),))
    asked = {cell.power for cell in table_pretraining.to_tune(settings, fine_tuned(losses))}
    assert asked - set(losses) == more


def test_pretraining_is_judged_by_seeds_on_which_nothing_was_chosen():
    tuned = fine_tuned({-1: 5.9, 0: 5.5, 1: 5.9}) + fine_tuned({-1: 5.9, 0: 5.5, 1: 5.4}, 0, "els")
    settings = table_pretraining.Settings(*("", 1, 1, 1, 1, 1, 1), seeds=(0, 1, 2))
    asked = table_pretraining.to_judge(settings, tuned)
    assert [(c.seed, c.algorithm, c.power) for c in asked] == [
        *((1, "els", 1), (1, "uls", 0), (2, "els", 1), (2, "uls", 0)),
    ]
    assert [held for _, held, _ in table_pretraining.check(tuned)] == [None]

    def found(els, uls):
        judged = [fine_tuned({0: uls + s / 100}, s) for s in (1, 2)]
        judged += [fine_tuned({1: els + s / 100}, s, "els") for s in (1, 2)]
        return verdicts("table_pretraining", tuned + sum(judged, []))

    assert found(5.5, 5.5) == [True, True, True, False]  # ELS is at the edge of its rates
    assert found(5.5, 5.7) == [True, True, False, False]
    assert found(5.5, 6.1) == [True, False, False, False]


def rates(loss, seeds=(0,), powers=(0,)):
    """Trainings of the real model for loss(algorithm, power)."""
    return [
        {
            **dict(zip(real_model_rates.SETTING, setting, strict=True)),
            **{"power": power, "loss_before": 5.0, "planned": 16, "learning_rate": 3.0**power},
            **{"seed": seed, "loss": loss(setting[2], power) + 0.001 * seed},
        }
        for setting in real_model_rates.planned(real_model_rates.SETTINGS["small"])
        for seed in seeds
        for power in powers
    ]


def test_rates_of_the_real_model_are_tried_outwards_and_the_best_with_both_seeds():
    settings = real_model_rates.SETTINGS["small"]

    def asked(*rows):
        cells = real_model_rates.todo(settings, [row for each in rows for row in each])
        assert len(cells) % 16 == 0  # of all settings alike
        return sorted({(cell.seed, cell.power) for cell in cells})

    def good(algorithm, power):
        return 4.0 + abs(power - 2)

    assert asked(rates(good)) == [(0, -1), (0, 1)]
    tried = rates(good, powers=(-1, 0, 1))
    assert asked(tried) == [(0, 2)]
    tried += rates(good, powers=(2,))
    assert asked(tried) == [(0, 3)]
    tried += rates(good, powers=(3,))
    assert asked(tried) == [(1, 0), (1, 2)]
    assert asked(tried, rates(good, seeds=(1,))) == [(1, 2)]
    assert asked(tried, rates(good, seeds=(1,), powers=(0, 2))) == []
    wild = rates(lambda _, power: 4.0 - power, powers=range(-1, 4))
    assert asked(wild) == [(1, 0), (1, 3)]  # no further


def test_rates_of_the_real_model_are_tuned_for_the_best_groups_of_its_record():
    settings = real_model_rates.planned(real_model_rates.SETTINGS["small"])
    assert len(set(settings)) == len(settings) == 16
    rows = records.read_rows(records.RESULTS / "small" / "real_model.csv")
    rows = [row for row in rows if row["rank"] == real_model_claims.RANK]
    for setting, own in by(rows, lambda row: real_model_rates.setting_of(row)[:3]).items():
        losses = by(own, lambda row: row["group"])
        best = min(losses, key=lambda group: np.mean([row["loss"] for row in losses[group]]))
        assert (*setting, best) in settings


def test_rates_of_the_real_model_are_judged_where_both_have_all_seeds():
    def judged(loss, powers=(-1, 0, 1)):
        rows = rates(loss, powers=powers) + rates(loss, seeds=(1,), powers=powers)
        return {what: records.verdict(h) for what, h, _ in real_model_rates.check(rows)}

    held = judged(lambda algorithm, power: 4.0 + 0.05 * abs(power))
    assert len(held) == 19 and all(held.values())
    held = judged(lambda algorithm, power: 5.1 + 0.2 * power + 0.1 * (algorithm == "uls"))
    assert [what for what, holds in held.items() if holds is True] == [
        "ours: all settings were tuned"
    ]
    some = rates(lambda *at: 4.0, powers=(0,))
    assert real_model_rates.check(some) == [("ours: all settings were tuned", False, "0 of 16")]
