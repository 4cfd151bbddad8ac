"""All that is claimed: a row for each claim, by experiment.

A row is the statement; the quantity that it is about (`quantities.py`: values of a record's rows,
with their standard errors); and the rule by which they show it (`harness/claims.py`: yes, no, or
not shown). Where a statement names a column in braces, it is judged for each of its values by
itself. A row is not judged on rows that have nothing of its quantity.

"Ours" and "beyond the paper" are claims that the paper does not make. A bound is fixed before
records are judged by it.
"""

from experiments import quantities as of
from experiments.data.stand_ins import CC_NEWS, STACK_OVERFLOW
from experiments.harness.claims import AHEAD, Claim, above, at_least, at_most, in_share, no_worse
from experiments.quantities import GAIN_SHARE, MARGIN

ROUNDING = 1e-5
"""Relative error of a noise multiplier that calibration leaves, with room; of one by black-box
group privacy it is `NOISE_ACCURACY`."""
NOISE_ACCURACY = 1e-3
EXPLODED = 700.0
"""e^epsilon leaves double precision: the guarantee is void."""
SOME = 1e-9
"""A share of settings that one is."""
MOST = 0.5
EPSILON, BUDGET, SIGMA_2 = ("epsilon", min), ("budget", max), ("example_std", max)
"""Panels of Figure 3, and where larger groups are to help."""
BETTER = "ULS is significantly better than ELS at "
RATES_INSIDE = {
    "ours: no learning rate is at the edge of those that were tried": Claim(
        of.rates_inside, at_least(True)
    )
}

CLAIMS = {
    "fig01_accounting": {
        "epsilon of ELS grows almost linearly in G": Claim(of.powers_of_growth, at_most((1.25, 2))),
        "black-box group privacy is never better": Claim(of.black_box_ratios, at_least(1)),
        "and falls behind ever further": Claim(of.black_box_gains, at_most(0)),
        "it blows up where sigma is small": Claim(of.black_box_ends, above(EXPLODED)),
        "ours: for one epsilon black-box group privacy never takes less noise": Claim(
            of.black_box_noise, at_least(1 - NOISE_ACCURACY)
        ),
    },
    "fig02_variance": {
        "G_ELS hardly matters for ELS's noise": Claim(of.els_spreads, at_most(1.2)),
        "with L_ULS = L_ELS ELS has less noise nearly everywhere": Claim(
            of.aligned, in_share(0.9, above(1))
        ),
        "and everywhere with the largest groups (Conjecture 3.1)": Claim(
            of.aligned_of_largest, at_least(1)
        ),
        "with L_ULS = L_ELS / sqrt(G) ULS has mostly less noise": Claim(
            of.orthogonal, in_share(MOST, above(1))
        ),
        "and everywhere at the smallest epsilon, and with the largest groups": Claim(
            of.orthogonal_at_ends, above(1)
        ),
    },
    "conjecture": {
        (
            "sigma_ELS <= K sigma_ULS (Conjecture 3.1) where epsilon >= 0.5, delta <= 0.05 and "
            "T q > 2 delta"
        ): Claim(
            of.noise_ratios(lambda eps, delta, edge: eps >= 0.5 and delta <= 0.05 and not edge),
            at_most(1 + ROUNDING),
        ),
        "it is false at epsilon = 0 in one step": Claim(
            of.noise_ratios(lambda eps, _delta, _edge: eps == 0), above(1 + ROUNDING)
        ),
        "it is false in some cells with a small epsilon, away from the edge": Claim(
            of.noise_ratios(lambda eps, _delta, edge: 0 < eps < 0.5 and not edge),
            in_share(SOME, above(1 + ROUNDING)),
        ),
        "it is false in some cells with a delta near 1, whatever epsilon": Claim(
            of.noise_ratios(lambda eps, delta, edge: eps >= 0.5 and delta > 0.05 and not edge),
            in_share(SOME, above(1 + ROUNDING)),
        ),
    },
    "lemma": {"Lemma 3.2": Claim(of.lemma_excesses, at_most(0))},
    "fig03_mean_estimation": {
        "ULS with G = 1 is comparable to ELS or better": Claim(
            of.uls_over_els, at_most(1 + GAIN_SHARE)
        ),
        "larger G help at small epsilon": Claim(of.gain_at(*EPSILON), AHEAD),
        BETTER + "small epsilon": Claim(of.lead_at(*EPSILON), above((0, GAIN_SHARE))),
        "larger G help at large budget": Claim(of.gain_at(*BUDGET), AHEAD),
        BETTER + "large budget": Claim(of.lead_at(*BUDGET), above((0, GAIN_SHARE))),
        "larger G help at large sigma_2": Claim(of.gain_at(*SIGMA_2), AHEAD),
        BETTER + "large sigma_2": Claim(of.lead_at(*SIGMA_2), above((0, GAIN_SHARE))),
        "ELS is no better with G = {group_size} than with G = K": Claim(
            of.gains_by_els_groups, at_most(GAIN_SHARE)
        ),
    },
    "fig04_els_group_size": {
        "{dataset}: with the median user's group size at most 10% of the gain is lost": Claim(
            of.losses_by_median_group, at_most(0.1)
        ),
        **RATES_INSIDE,
    },
    "fig05_uls_heatmap": {
        "the best G is at least ten times below the best M": Claim(
            of.leads_of_small_groups, no_worse(MARGIN)
        ),
        "up to a limit it is better to enlarge the cohort than the group": Claim(
            of.leads_of_cohorts, AHEAD
        ),
        "ours: every configuration is better than the model it started from": Claim(
            of.gains_over_start, AHEAD
        ),
        "G = 64 and M = 4096 are better than G = 256 and M = 1024": Claim(
            of.leads_of_large_cohort, AHEAD
        ),
        **RATES_INSIDE,
    },
    "fig06_privacy_loss": {
        "{dataset}: ULS is at least as good as ELS": Claim(
            of.on(STACK_OVERFLOW, of.leads_over_els), no_worse(MARGIN)
        ),
        "{dataset}: ULS is better than ELS in many settings": Claim(
            of.on(CC_NEWS, of.leads_over_els), in_share(MOST, AHEAD)
        ),
        "{dataset}: ULS is ahead the most where epsilon is small": Claim(
            of.leads_at_small_epsilon, AHEAD
        ),
        "{dataset}: ULS gains more from compute than ELS": Claim(of.gains_by_compute, AHEAD),
        "{dataset}: fine-tuning improves on the pre-trained model": Claim(
            of.gains_by_tuning, AHEAD
        ),
        (
            "{dataset}, beyond the paper: ULS is at least as good as ELS with the best of {tried} "
            "groups"
        ): Claim(of.leads_over_best_els, no_worse(MARGIN)),
        "beyond the paper: local steps are at least as good as none": Claim(
            of.gains_by_local_steps, no_worse(MARGIN)
        ),
        **RATES_INSIDE,
    },
    "fig08_num_users": {
        "ULS gains more from a larger budget than ELS": Claim(of.gains_by_budget, AHEAD),
        "ELS gains more from more users than ULS": Claim(of.gains_by_users, AHEAD),
        **RATES_INSIDE,
    },
    "fig14_tuner_suboptimality": {
        "{dataset}: Estimate-and-Double lies within the oracle's band at most budgets": Claim(
            of.distances_to_oracle, in_share(MOST, at_most(MARGIN))
        ),
        "{dataset}: Estimate-and-Double is nearer the best than a random choice": Claim(
            of.lead_over_chance, AHEAD
        ),
    },
    "fig18_personalization": {
        "personalization lowers the loss of every model": Claim(of.personal_gains, AHEAD),
        "both algorithms gain alike, within 5%": Claim(
            of.personal_differences, at_most(GAIN_SHARE)
        ),
        "with personalization ULS is at least as good as ELS": Claim(
            of.personal_leads, no_worse(MARGIN)
        ),
        "ours: personalization leaves ULS its lead": Claim(of.change_of_lead, no_worse(MARGIN)),
        "the order of the algorithms stays": Claim(of.leads_as_before, AHEAD),
        **RATES_INSIDE,
    },
    "fig10_dataset_sizes": {
        "{dataset}: users' sizes differ by a hundred times or more": Claim(
            of.spread_of_sizes, at_least(100)
        ),
    },
    "table1_datasets": {
        "the made-up data have Stack Overflow's shape": Claim(
            of.differences_from_shape, at_most((0, 0, 0, 1))
        ),
        "users' sizes differ by more than ten times in the stand-ins": Claim(
            of.spreads_of_sizes, above(10)
        ),
        "1 to 32 examples of a user are reserved in the stand-ins": Claim(
            of.reserved_examples, at_most(0)
        ),
    },
    "table2_c4": {
        "near duplicates that were planted are found": Claim(
            of.duplicates_left, at_most((0.01, 0))
        ),
        "URLs that were planted are found": Claim(of.urls_left, at_most(0)),
        "other texts of a stand-in stay": Claim(of.share_of_texts_left, at_least(0.98)),
    },
    "table_quoted": {
        "composed runs cost less than chosen ones, and these less than their sum": Claim(
            of.savings_by_composition, at_least(0)
        ),
        "the best of ten costs less than all ten": Claim(of.savings_by_selection, above(0)),
        "correlated noise is predicted to err less than independent noise": Claim(
            of.savings_by_correlation, above(0)
        ),
    },
    "table_mutations": {"every mistake is caught": Claim(of.mistakes_caught, at_least(True))},
}
