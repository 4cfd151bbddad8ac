"""What claims are about: quantities of a record's rows, with their standard errors.

Seeds share draws and noise with all cells, so they are compared in pairs where rows have the losses
by seed (`by_seed`): the variance is what is left of losses without the means of their cells and of
their seeds. Where a record has means and deviations alone, cells count as independent, which is the
larger error where seeds move cells alike. Either variance is pooled over the cells of a data set,
since two seeds alone say little; cells without noise, which may diverge, and cells with it are
pooled apart. One seed alone shows nothing. In Figure 3 errors are of paired trials, in Figure 18 of
users, too.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from experiments.data.stand_ins import stands_for
from experiments.harness.claims import AHEAD, no_worse
from experiments.harness.rows import (
    ERRORS,
    Quantity,
    Row,
    Rows,
    StandardError,
    by,
    paired,
    seed_error,
)

MARGIN = 0.01
"""Nats, of held-out losses of trainings."""
GAIN_SHARE = 0.05
"""Of a gain, or of the loss of mean estimation: what counts as alike."""
UNKNOWN = StandardError(math.inf, 0)
CELLS = "in {yes} of {count} cells"


def cell_error(rows: Rows, block: Sequence[str] = ("dataset", "epsilon")) -> StandardError:
    """Standard error of the mean loss of one of these cells, for differences between cells of one
    block; of k cells it is sqrt(k) times as much. Infinite for one seed; cells that came to
    no number are left out.

    Args:
      rows: the cells whose variance is pooled.
      block: columns; cells that are alike in these have the same seeds.
    """
    rows = [row for row in rows if math.isfinite(row["loss"])]
    if not rows or min(row["seeds"] for row in rows) < 2:
        return UNKNOWN
    if not all(row.get("by_seed") for row in rows):
        return seed_error(rows)
    squares, freedom = 0.0, 0
    blocks = by(rows, lambda row: tuple(row.get(name) for name in block)).values()
    for table in map(losses_by_seed, blocks):
        cells, seeds = table.shape
        left = table - table.mean(0) - table.mean(1)[:, None] + table.mean()
        squares += float((left**2).sum())
        freedom += (cells - 1) * (seeds - 1)
    least = min(row["seeds"] for row in rows)
    if not freedom:
        return seed_error(rows)
    return StandardError(math.sqrt(squares / freedom / least), freedom)


def pair_error(rows: Rows) -> StandardError:
    """Of the difference of two of these cells."""
    return np.sqrt(2) * cell_error(rows)


def losses_by_seed(rows: Rows) -> np.ndarray:
    """[cells, seeds] of the cells of a block, which have the same seeds in the same order."""
    return np.array([[float(loss) for loss in str(row["by_seed"]).split()] for row in rows])


def of_each_budget(rows: Rows) -> list[Rows]:
    """The rows of each epsilon and budget."""
    return [*by(rows, lambda row: (row["epsilon"], row["budget"])).values()]


def rates_inside(rows: Rows) -> Quantity:
    """Whether learning rates that were chosen are inside the grids that they are from; of rows that
    do not say nothing."""
    found = [row.get("inside_grid") for row in by_heuristics(rows)]
    return Quantity([inside for inside in found if inside is not None], "{no} of {count} are")


# Figure 1.


def curves(rows: Rows) -> list[Rows]:
    """Along G, one for each noise multiplier; without the rows of one epsilon."""
    own = [row for row in rows if row["black_box_epsilon"] is not None]
    return [*by(own, lambda row: row["noise_multiplier"]).values()]


def powers_of_growth(rows: Rows) -> Quantity:
    """The largest local power of G (1 is linear) by which epsilon grows while it is below 10, and
    the largest of all."""
    powers: dict[bool, list[float]] = {True: [], False: []}
    for before, after in (pair for own in curves(rows) for pair in itertools.pairwise(own)):
        growth, of_group = (math.log(after[n] / before[n]) for n in ("epsilon", "group_size"))
        powers[after["epsilon"] < 10].append(growth / of_group)
    ends = [max(powers[True]), max(powers[True] + powers[False])]
    return Quantity(ends, "locally at most G^{0:.2f} while epsilon < 10, G^{1:.2f} beyond")


def black_box_ratios(rows: Rows) -> Quantity:
    """Epsilon of black-box group privacy over that of ELS."""
    own = [row["black_box_epsilon"] / row["epsilon"] for each in curves(rows) for row in each]
    return Quantity(own, "in {yes} of {count}")


def black_box_gains(rows: Rows) -> Quantity:
    """How often this ratio falls along G, for each noise multiplier."""
    ratios = [itertools.pairwise(black_box_ratios(series).values) for series in curves(rows)]
    falls = [sum(b < a for a, b in pairs) for pairs in ratios]
    return Quantity(falls, "at {yes} of {count} noise multipliers")


def black_box_ends(rows: Rows) -> Quantity:
    """Epsilon of black-box group privacy with the largest G, for sigma <= 1."""
    ends = [series[-1] for series in curves(rows) if series[-1]["noise_multiplier"] <= 1]
    numbers = "epsilon {least:.3g} at least at the largest G"
    return Quantity([row["black_box_epsilon"] for row in ends], numbers)


def black_box_noise(rows: Rows) -> Quantity:
    """Noise for one epsilon by black-box group privacy, over that by the accountant."""
    own = [row for row in rows if row["black_box_epsilon"] is None]
    ratios = [row["black_box_noise_multiplier"] / row["noise_multiplier"] for row in own]
    return Quantity(ratios, "{least:.3f} to {most:.3f} times as much")


# Figures 2 and 9; Conjecture 3.1 and Lemma 3.2.


def els_spreads(rows: Rows) -> Quantity:
    """ELS's largest variance over its least, of all G at one budget; for each epsilon."""
    own = by((row for row in rows if not row["uls_group_size"]), lambda row: row["epsilon"])
    variances = [[row["els"] for row in series] for series in own.values()]
    return Quantity([max(v) / min(v) for v in variances], "a factor of at most {most:.3f}")


def several(rows: Rows) -> Rows:
    """Rows with G_ULS > 1: with 1, ULS is ELS with G_ELS = 1, but for what G_ELS does."""
    return [row for row in rows if row["uls_group_size"] and row["uls_group_size"] > 1]


def largest(rows: Rows) -> Rows:
    """Rows with the largest G_ULS."""
    most = max(row["uls_group_size"] for row in several(rows))
    return [row for row in rows if row["uls_group_size"] == most]


def aligned(rows: Rows) -> Quantity:
    """ULS's variance over ELS's for aligned gradients, where G > 1."""
    ratios = [row["uls_aligned"] / row["els"] for row in several(rows)]
    return Quantity(ratios, CELLS + " with G > 1")


def aligned_of_largest(rows: Rows) -> Quantity:
    """The same with the largest G."""
    return aligned(largest(rows))._replace(numbers="in {yes} of {count}")


def orthogonal(rows: Rows) -> Quantity:
    """ELS's variance over ULS's for orthogonal gradients, where G > 1."""
    ratios = [row["els"] / row["uls_orthogonal"] for row in several(rows)]
    return Quantity(ratios, CELLS + " with G > 1")


def orthogonal_at_ends(rows: Rows) -> Quantity:
    """The same at the smallest epsilon, and with the largest G."""
    least, most = min(row["epsilon"] for row in rows), largest(rows)
    ends = [row for row in rows if row["epsilon"] == least or row in most]
    return orthogonal(ends)._replace(numbers="in {yes} of {count}")


def noise_ratios(where: Callable[[float, float, bool], bool]) -> Callable[[Rows], Quantity]:
    """sigma_ELS / (K sigma_ULS). Args: where: of epsilon, delta and whether T q <= 2 delta."""

    def ratios(rows: Rows) -> Quantity:
        own = [row for row in rows if where(row["epsilon"], row["delta"], bool(row["edge"]))]
        return Quantity([row["ratio"] for row in own], CELLS)

    return ratios


def lemma_excesses(rows: Rows) -> Quantity:
    """How far ELS's divergence is above ULS's, beyond the error of the integration."""
    pairs = [(row["els_divergence"], row["uls_divergence"]) for row in rows]
    return Quantity([els - uls * (1 + 1e-9) - 1e-12 for els, uls in pairs], CELLS)


# Figure 3.


def better(row: Row, rival: str) -> tuple[float, float]:
    """How far a row's loss is below a rival's, as a share of that one, and the standard error.
    Args: rival: "els" with G = K, or "uls_1", with G = 1."""
    of_rival = row["loss"] - row[f"minus_{rival}"]
    return -row[f"minus_{rival}"] / of_rival, row[f"minus_{rival}_error"] / of_rival


def uls_over_els(rows: Rows) -> Quantity:
    """The loss of ULS with G = 1 over that of ELS with G = K."""
    own = [better(r, "els") for r in rows if (r["algorithm"], r["group_size"]) == ("ULS", 1)]
    ratios, far = [1 - gain for gain, _ in own], max(1 - gain + 2 * error for gain, error in own)
    numbers = "in {yes} of {count}; ULS / ELS up to {most:.3f}, with two standard errors up to "
    return Quantity(ratios, f"{numbers}{far:.3f}", [error for _, error in own])


def best_uls(rows: Rows, panel: str) -> Rows:
    """ULS's rows with the least loss at each value of a panel."""
    own = [row for row in rows if (row["panel"], row["algorithm"]) == (panel, "ULS")]
    return [min(each, key=lambda r: r["loss"]) for each in by(own, lambda r: r[panel]).values()]


def gain_at(panel: str, end: Callable[..., Row]) -> Callable[[Rows], Quantity]:
    """How far the best G is below G = 1 at one end of a panel, and by how much more than at the
    other one."""

    def gain(rows: Rows) -> Quantity:
        own, (other_end,) = best_uls(rows, panel), {min, max} - {end}
        strong, mild = (pick(own, key=lambda row: row[panel]) for pick in (end, other_end))
        (gain, error), (other, _) = better(strong, "uls_1"), better(mild, "uls_1")
        numbers = f"best G = {strong['group_size']}, {gain:.1%} below G = 1 at {panel} = "
        numbers += f"{strong[panel]:g}; {other:.1%} at {mild[panel]:g}"
        return Quantity([gain, gain - other], numbers, [error, 0.0])

    return gain


def lead_at(panel: str, end: Callable[..., Row]) -> Callable[[Rows], Quantity]:
    """How far the best G is below ELS there, with its error and without."""

    def lead(rows: Rows) -> Quantity:
        strong = end(best_uls(rows, panel), key=lambda row: row[panel])
        gain, error = better(strong, "els")
        return Quantity([gain, gain], "{0:.1%} below", [error, 0.0])

    return lead


def gains_by_els_groups(rows: Rows) -> Quantity:
    """Of one group size: how far ELS is below ELS with G = K, which has no error against itself."""
    own = [r for r in rows if r["algorithm"] == "ELS" and r["minus_els_error"]]
    gains = [better(row, "els") for row in own]
    far = max((gain + 2 * error for gain, error in gains), default=0)
    numbers = "in {yes} of {count}; better by up to {most:.1%}, with two standard errors "
    return Quantity([gain for gain, _ in gains], f"{numbers}{far:.1%}", [e for _, e in gains])


# Figures 4, 5 and 11 to 15.


def losses_by_median_group(rows: Rows) -> Quantity:
    """How far the median user's group size is above the best one, in units of the best one's gain
    over the model before; with every budget and epsilon."""
    excesses, gains = [], []
    for series in of_each_budget(rows):
        best = min(row["loss"] for row in series)
        (median,) = (row for row in series if row["group_size"] == row["median_examples"])
        excesses.append(median["loss"] - best)
        gains.append(median["loss_before"] - best)
    shares = np.divide(excesses, gains)
    numbers = "in {yes} of {count} settings, not in {no}; it loses {most:.4f} nats at most, "
    numbers += f"{shares.min():.0%} to {shares.max():.0%} of the gain, standard error {{error:.4f}}"
    return Quantity(excesses, numbers, [pair_error(rows)], gains)


def leads_of_small_groups(rows: Rows) -> Quantity:
    """How far the best G that is ten times below its M is ahead of the best of the other ones, with
    each budget that has both."""
    leads = []
    for series in of_each_budget(rows):
        kinds = by(series, lambda row: 10 * row["group_size"] <= row["cohort_size"])
        least = {small: min(row["loss"] for row in own) for small, own in kinds.items()}
        leads += [least[False] - least[True]] if len(least) == 2 else []
    numbers = "in {yes} of {count} budgets with a choice; standard error {error:.4f}"
    return Quantity(leads, numbers, [pair_error(rows)])


def leads_of_cohorts(rows: Rows) -> Quantity:
    """How far G = 1 is ahead of all larger G with the same budget, of budgets up to the paper's
    limit, 512; the numbers are the cohorts up to which it is."""
    leads, error = [], pair_error(rows)
    smallest, largest = (pick(row["cohort_size"] for row in rows) for pick in (min, max))
    limits = dict.fromkeys((row["epsilon"] for row in rows), smallest)
    for series in sorted(of_each_budget(rows), key=lambda series: series[0]["budget"]):
        epsilon, budget = series[0]["epsilon"], series[0]["budget"]
        kinds = by(series, lambda row: row["group_size"] == 1)
        if len(kinds) == 2:
            lead = min(row["loss"] for row in kinds[False]) - kinds[True][0]["loss"]
            leads += [lead] * (budget <= 512)
            sure = AHEAD.verdicts(Quantity([lead], "", [error])) == [True]
            if sure and limits[epsilon] == budget // 2:
                limits[epsilon] = budget
    numbers = ", ".join(f"{limit} at epsilon {epsilon:g}" for epsilon, limit in limits.items())
    numbers = f"up to a cohort of {numbers}; the largest here is {largest}"
    return Quantity(leads, numbers, [error])


def gains_over_start(rows: Rows) -> Quantity:
    """How far losses are below that of the model before; of single trainings, without errors."""
    gains = [row["loss_before"] - row["loss"] for row in rows]
    return Quantity(gains, "{yes} of {count} are")


def leads_of_large_cohort(rows: Rows) -> Quantity:
    """How far G = 64 and M = 4096 are ahead of G = 256 and M = 1024; at the paper's scale alone."""
    cells = by(rows, lambda row: (row["group_size"], row["cohort_size"]))
    pairs = zip(cells.get((256, 1024), []), cells.get((64, 4096), []), strict=True)
    leads = [other["loss"] - own["loss"] for other, own in pairs]
    return Quantity(leads, "by {least:.4f} at least", [pair_error(rows)])


def averaged(rows: Rows) -> Rows:
    """Mean and standard deviation over epsilon, and the seeds' standard error of the mean."""
    found = []
    keys = ("dataset", "strategy", "budget")
    for where, own in by(rows, lambda row: tuple(row[key] for key in keys)).items():
        values = [row["suboptimality"] for row in own]
        spread = {"mean": float(np.mean(values)), "std": float(np.std(values))}
        spread["seed_error"] = own[0]["seed_error"] / np.sqrt(len(own))
        found.append({**dict(zip(keys, where, strict=True)), **spread})
    return found


def means_of(rows: Rows) -> tuple[list[np.ndarray], float]:
    """Mean suboptimality with each budget of Estimate-and-Double, the greedy local oracle and a
    random choice; and the standard error of a difference of two."""
    own = by(averaged(rows), lambda row: row["strategy"])
    names = ("estimate-and-double", "greedy local oracle", "random")
    means = [np.array([row["mean"] for row in own[name]]) for name in names]
    return means, np.sqrt(2) * own[names[0]][0]["seed_error"]


def distances_to_oracle(rows: Rows) -> Quantity:
    """How far Estimate-and-Double is above the oracle, with each budget."""
    (ours, oracle, _), error = means_of(rows)
    numbers = "at {yes} of {count}; above the oracle by {most:.4f} at most, standard error "
    return Quantity(ours - oracle, numbers + "{error:.4f}", [error])


def lead_over_chance(rows: Rows) -> Quantity:
    """How far Estimate-and-Double is below a random choice, on average over budgets."""
    means, error = means_of(rows)
    ours, oracle, random = (each.mean() for each in means)
    numbers = f"mean suboptimality {ours:.4f}, oracle {oracle:.4f}, random {random:.4f}; standard "
    return Quantity(
        [random - ours], numbers + "error {error:.4f}", [error / np.sqrt(len(means[0]))]
    )


# Figures 6 to 8, 16 and 17.


def by_heuristics(rows: Rows) -> Rows:
    """The rows of trainings with noise and of the group sizes that the paper's heuristics say.
    Rows that do not say are."""
    return [r for r in rows if r.get("epsilon") != math.inf and not r.get("other_group")]


def has_local_steps(row: Row) -> bool:
    """True of rows of the record that were computed when users could take steps of their own."""
    return row.get("local_steps", 1) > 1


def compared(rows: Rows) -> Rows:
    """The rows of the paper's comparison."""
    return [row for row in by_heuristics(rows) if not has_local_steps(row)]


def best_els(rows: Rows) -> Rows:
    """ELS with the best group size of each cell, of as many as `tried` says; nothing where one
    alone was trained."""
    own = [row for row in rows if row["algorithm"] == "els" and not math.isinf(row["epsilon"])]
    cells = by(own, lambda row: (row["dataset"], row["epsilon"], row["budget"])).values()
    return [
        {**min(each, key=lambda row: row["loss"]), "tried": len(each)}
        for each in cells
        if len(each) > 1
    ]


def on(dataset: str, quantity: Callable[[Rows], Quantity]) -> Callable[[Rows], Quantity]:
    """Of this data set of the paper or what stands for it; of others nothing."""

    def of_rows(rows: Rows) -> Quantity:
        return quantity(rows if stands_for(rows[0]["dataset"]) == dataset else [])

    return of_rows


def led(rows: Rows, leads: Sequence[float], numbers: str) -> Quantity:
    """Leads of ULS, with what is said of all such leads."""
    found = Quantity(leads, "", [pair_error(compared(rows))])
    good, better = (rule.verdicts(found).count(True) for rule in (no_worse(MARGIN), AHEAD))
    counts = f"as good in {good} of {{count}} settings, better in {better}; ahead by {{least:.4f}} "
    return found._replace(numbers=counts + "to {most:.4f}, standard error {error:.4f}; " + numbers)


def leads_over_els(rows: Rows) -> Quantity:
    """How far ULS is ahead of ELS in each setting."""
    pairs = paired(compared(rows))
    groups = sorted({uls["group_size"] for _, uls in pairs})
    leads = [els["loss"] - uls["loss"] for els, uls in pairs]
    return led(rows, leads, f"G_ULS {', '.join(map(str, groups))}")


def leads_over_best_els(rows: Rows) -> Quantity:
    """How far ULS by its heuristic is ahead of ELS with the best group of each cell, chosen by
    these losses."""
    best = {(row["epsilon"], row["budget"]): row for row in best_els(rows)}
    own = [uls for _, uls in paired(compared(rows))] if best else []
    leads = [best[uls["epsilon"], uls["budget"]]["loss"] - uls["loss"] for uls in own]
    groups = ", ".join(map(str, sorted({row["group_size"] for row in best.values()})))
    tried = min((row["tried"] for row in best.values()), default=0)
    return led(rows, leads, f"G_ELS {groups}")._replace(fields={"tried": tried})


def gains_along(rows: Rows, column: str, each: str) -> tuple[np.ndarray, np.ndarray]:
    """Of ELS and of ULS: the loss at the least value of a column less that at the largest one, for
    each value of another column."""
    gains = []
    for algorithm in ("els", "uls"):
        own = sorted((r for r in rows if r["algorithm"] == algorithm), key=lambda row: row[column])
        series = by(own, lambda row: row[each]).values()
        gains.append(np.array([cells[0]["loss"] - cells[-1]["loss"] for cells in series]))
    return gains[0], gains[1]


def leads_at_small_epsilon(rows: Rows) -> Quantity:
    """By how much more ULS is ahead at the smallest epsilon than at the largest, with each
    budget."""
    own = compared(rows)
    first, last = (pick(row["epsilon"] for row in own) for pick in (min, max))
    els, uls = gains_along(own, "epsilon", "budget")
    numbers = f"by {{least:.4f}} to {{most:.4f}} more at epsilon {first:g} than at {last:g}, "
    return Quantity(els - uls, numbers + "standard error {error:.4f}", [2 * cell_error(own)])


def gains_by_compute(rows: Rows) -> Quantity:
    """By how much more ULS gains from the largest budget, over the smallest, than ELS, at each
    epsilon. That ULS is ahead by more with the largest budget is the same difference."""
    own = compared(rows)
    els, uls = gains_along(own, "budget", "epsilon")
    numbers = f"{uls.mean():.4f} against {els.mean():.4f} on average over epsilon; more at "
    numbers += "{positive} of {count} epsilons, by {least:.4f} to {most:.4f}, standard error "
    return Quantity(uls - els, numbers + "{error:.4f}", [2 * cell_error(own)])


def gains_by_tuning(rows: Rows) -> Quantity:
    """How far fine-tuning lowers the loss in each setting of both algorithms."""
    own = compared(rows)
    gains = [row["loss_before"] - row["loss"] for row in own]
    # The model before has no seeds of its own, with which to compare in pairs.
    error = seed_error(own) if min(row["seeds"] for row in own) > 1 else UNKNOWN
    return Quantity(gains, "in {yes} of {count} settings, by {mean:.4f} on average", [error])


def gains_by_local_steps(rows: Rows) -> Quantity:
    """How far ULS with local steps is below ULS without, at equal epsilon and budget."""
    names = {row["dataset"] for row in rows if has_local_steps(row)}
    own = [row for row in by_heuristics(rows) if row["dataset"] in names]
    cells = of_each_budget([row for row in own if row["algorithm"] == "uls"])
    pairs = [sorted(cell, key=has_local_steps) for cell in cells]
    numbers = "in {yes} of {count} settings; better by {mean:.4f} on average, standard error "
    gains = [without["loss"] - local["loss"] for without, local in pairs]
    return Quantity(gains, numbers + "{error:.4f}", [pair_error(own)])


def more_of_users(rows: Rows, more: np.ndarray) -> Quantity:
    """What Figure 8 says of differences of gains; cells of one budget and population have the same
    seeds."""
    numbers = "by {mean:.4f} on average; more in {positive} of {count} settings, by {least:.4f} at "
    error = 2 * cell_error(rows, ("dataset", "times", "budget"))
    return Quantity(more, numbers + "least, standard error {error:.4f}", [error])


def gains_by_budget(rows: Rows) -> Quantity:
    """By how much more ULS gains from the largest budget, over the smallest, than ELS; for each
    population."""
    els, uls = gains_along(rows, "budget", "times")
    return more_of_users(rows, uls - els)


def gains_by_users(rows: Rows) -> Quantity:
    """By how much more ELS gains from the most users, over the fewest, than ULS; with each
    budget."""
    els, uls = gains_along(rows, "times", "budget")
    return more_of_users(rows, els - uls)


# Figure 18.


def estimates(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column, and its standard errors over users and over seeds, whose variance is that of all
    rows."""
    columns = ([row[name + of] for row in rows] for of in ("", "_error", "_std"))
    values, of_users, of_seeds = map(np.array, columns)
    variance = np.mean(of_seeds**2 / [row["seeds"] for row in rows])
    return values, np.sqrt(of_users**2 + variance)


def one_of_pairs(rows: Rows) -> Rows:
    """Of each epsilon and budget: what is said of a pair of algorithms is in both rows."""
    return [own[0] for own in of_each_budget(rows)]


def personal_gains(rows: Rows) -> Quantity:
    """How far personalization lowers each loss."""
    gains, errors = estimates(rows, "gain")
    return Quantity(gains, "of {yes} of {count}, by {mean:.4f} on average", [*errors])


def personal_differences(rows: Rows) -> Quantity:
    """How far the two algorithms' gains are apart, in units of the mean gain."""
    differences, errors = estimates(one_of_pairs(rows), "more_gain")
    mean, far = np.mean([row["gain"] for row in rows]), (abs(differences) + 2 * errors).max()
    numbers = "in {yes} of {count}, not in {no}; gains differ by up to {most:.4f}, with two "
    numbers += f"standard errors by {far:.4f}, of {GAIN_SHARE * mean:.4f}"
    return Quantity(abs(differences), numbers, [*errors], mean)


def personal_leads(rows: Rows) -> Quantity:
    """How far ULS is ahead of ELS with personalization."""
    leads, errors = estimates(one_of_pairs(rows), "ahead_after")
    numbers = "in {yes} of {count}, by {mean:.4f} on average, {least:.4f} at least, standard error "
    return Quantity(leads, numbers + "up to {error:.4f}", [*errors])


def change_of_lead(rows: Rows) -> Quantity:
    """By how much personalization changes ULS's lead on average, where the users are the same."""
    changes, errors = estimates(one_of_pairs(rows), "more_gain")
    (before, _), (after, _) = (estimates(one_of_pairs(rows), n) for n in ("ahead", "ahead_after"))
    numbers = f"{before.mean():.4f} before, {after.mean():.4f} after, on average; standard error "
    return Quantity([changes.mean()], numbers + "of the difference {error:.4f}", [errors.mean()])


def leads_as_before(rows: Rows) -> Quantity:
    """The lead with personalization of the algorithm that is ahead without; unknown where neither
    is beyond the errors."""
    names = ("ahead", "ahead_after")
    (before, of_before), (after, errors) = (estimates(one_of_pairs(rows), n) for n in names)
    errors = np.where(np.abs(before) > ERRORS * of_before, errors, math.inf)
    numbers = "in {yes} of {count} beyond the errors, it turns in {no}"
    return Quantity(np.sign(before) * after, numbers, [*errors])


# Figure 10 and the tables.


def spread_of_sizes(rows: Rows) -> Quantity:
    """How many times the least user's examples the largest one has, by the bins of a histogram."""
    filled = [row for row in rows if row["users"]]
    users = sum(row["users"] for row in filled)
    numbers = f"a factor of {{0:.3g}} among {users:,}"
    return Quantity([filled[-1]["from"] / filled[0]["from"]], numbers)


def differences_from_shape(rows: Rows) -> Quantity:
    """Of the made-up data, from the shape that was asked for: of examples, users, the largest user
    and the median one."""
    names = ("Stack Overflow's shape", "Stack Overflow's shape, as asked for")
    made_up, shape = (next(row for row in rows if row["dataset"] == name) for name in names)
    columns = ("examples", "users", "max", "median")
    numbers = f"median {made_up['median']:g}, largest {made_up['max']:,}"
    return Quantity([abs(made_up[name] - shape[name]) for name in columns], numbers)


def spreads_of_sizes(rows: Rows) -> Quantity:
    """How many times the least user's examples the largest one has, of each data set."""
    ratios = [row["max"] / row["min"] for row in rows if row["split"] == "train"]
    return Quantity(ratios, "the largest is {least:.3g} to {most:,.0f} times the least")


def reserved_examples(rows: Rows) -> Quantity:
    """By how many a user's reserved examples leave 1 to 32, of each data set."""
    own = [row for row in rows if row["split"] == "eval_examples"]
    return Quantity([max(1 - row["min"], row["max"] - 32) for row in own], "in {count} data sets")


def stages(rows: Rows, dataset: str) -> list[int]:
    """How many examples there are, no duplicates among them, and neither those nor known URLs."""
    columns = ("examples", "deduplicated", "deduplicated_and_url_filtered")
    return [row[column] for row in rows if row["dataset"] == dataset for column in columns]


def duplicates_left(rows: Rows) -> Quantity:
    """How many planted near duplicates are left, and how many other texts are not, in units of all
    that were planted."""
    planted, found = stages(rows, "planted"), stages(rows, "planted, found")
    removed, left = planted[0] - planted[1], found[1] - planted[1]
    return Quantity([left, -left], f"{removed - left:,} of {removed:,} planted", unit=removed)


def urls_left(rows: Rows) -> Quantity:
    """How many planted URLs are left, beside those of near duplicates."""
    planted, found = stages(rows, "planted"), stages(rows, "planted, found")
    left = found[2] - planted[2] - (found[1] - planted[1])
    return Quantity([abs(left)], f"all but {left}")


def share_of_texts_left(rows: Rows) -> Quantity:
    """Of the stand-in for C4, where it was screened."""
    if not (found := stages(rows, "debian_desc")):
        return Quantity([], "")
    return Quantity([found[2] / found[0]], f"{found[2]:,} of {found[0]:,}")


def quoted(rows: Rows, *whats: str) -> tuple[list[float], str]:
    """The values of all rows that say one of these, and their text."""
    values = [row["value"] for row in rows if any(what in row["what"] for what in whats)]
    return values, ", ".join(f"{value:.2f}" for value in values)


def savings_by_composition(rows: Rows) -> Quantity:
    """How much less three runs cost that are composed than chosen ones, and these than added."""
    costs, shown = quoted(rows[::-1], "three runs, ")
    return Quantity(np.diff(costs), shown)


def savings_by_selection(rows: Rows) -> Quantity:
    """How much less the best of ten costs than all ten, and one trial than the best."""
    (one, *bests, ten), shown = quoted(rows, "one trial", "best of ten", "all ten")
    return Quantity([ten - max(bests), min(bests) - one], shown)


def savings_by_correlation(rows: Rows) -> Quantity:
    """By what share correlated noise is predicted to err less than independent noise."""
    ratios, shown = quoted(rows, "in each")
    return Quantity([1 - ratio for ratio in ratios], shown)


def mistakes_caught(rows: Rows) -> Quantity:
    """Whether its test caught each."""
    missed = [row["mistake"] for row in rows if row["test"] in ("-", "not asked")]
    numbers = "{yes} of {count}" + "".join(f"; not: {mistake}" for mistake in missed)
    return Quantity([row["mistake"] not in missed for row in rows], numbers)
