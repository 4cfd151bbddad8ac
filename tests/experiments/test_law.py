"""The law of gains: what was frozen, how rates are chosen, and when its claims fail."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from experiments import law, law_claims
from experiments.harness.common import RESULTS
from experiments.harness.records import read_rows
from experiments.harness.rows import by
from experiments.law_claims import CURVE, RESIDUAL, WITHOUT_NORMS
from experiments.regime_claims import ALL, FEW

LOOK = {"num_users": 7_014, "median_examples": 154}
LOOK["norms"] = {str(2**n): [15.0 / 1.35**n] for n in range(7)}
LOOKS = {ALL: {"data": ALL, **LOOK}, FEW: {"data": FEW, **LOOK, "num_users": 600}}
SETTINGS = law.SETTINGS["small"]


def fitted(with_norms):
    """(Curve, residuals' deviation) of the private cells of the regime's record."""
    places = {
        (r["data"], r["group_size"]): r["norm"]
        for r in read_rows(RESULTS / "small/regime_norms.csv")
    }
    rows = [r for r in read_rows(RESULTS / "small/regime.csv") if np.isfinite(r["epsilon"])]
    names = ("data", "algorithm", "epsilon", "group_size", "budget", "times")
    x, gains = [], []
    for own in by(rows, lambda row: tuple(row[name] for name in names)).values():
        row = own[0]
        norm = places[row["data"], row["group_size"] if row["algorithm"] == "uls" else 1]
        x.append(row["expected_count"] / row["noise_multiplier"] / (norm if with_norms else 1))
        gains.append(np.mean([each["loss_before"] - each["loss"] for each in own]))
    curve = np.polyfit(np.log(x), gains, 2)
    left = gains - np.polyval(curve, np.log(x))
    assert len(gains) == 31
    return curve, np.sqrt(np.sum(left**2) / 28)


def test_the_frozen_curves_are_the_fits_of_the_record_and_nothing_else():
    curve, residual = fitted(True)
    np.testing.assert_allclose(curve, CURVE, rtol=1e-5)
    np.testing.assert_allclose(residual, RESIDUAL, rtol=1e-3)
    np.testing.assert_allclose(fitted(False)[0], WITHOUT_NORMS, rtol=1e-5)


def test_twenty_cells_are_predicted_and_each_is_trained_five_times():
    places = list(law.places(SETTINGS, LOOKS))
    assert len(set(places)) == len(places) == law_claims.CELLS
    cells = list(law.tuning(SETTINGS, LOOKS))
    assert len(set(cells)) == 60
    rows = [{**dataclasses.asdict(c), "gain_validation": 0.1 * c.power} for c in cells]
    judged = list(law.fresh(SETTINGS, LOOKS, rows))
    assert len(set(judged)) == 40 and {cell.power for cell in judged} == {1}
    assert not {c.seed for c in judged} & {c.seed for c in cells}


def test_a_rate_is_chosen_by_validation_users_once_all_were_tried():
    place = law.Place(FEW, 4.0, "uls", 1)
    rows = [
        {**dataclasses.asdict(place), "power": power, "fresh": False, "gain_validation": gain}
        for power, gain in ((0, 0.1), (-1, 0.2), (1, float("nan")))
    ]
    assert law.best_power(place, rows, SETTINGS) == -1
    assert law.best_power(place, rows[:2], SETTINGS) is None


def test_validation_and_test_users_share_no_user_and_are_all_users():
    users = SimpleNamespace(num_users=5, offsets=np.array([0, 2, 5, 5, 9, 10]))
    validation, test = law.halves(users, 100)
    owner = np.repeat(np.arange(5), np.diff(users.offsets))
    assert not set(owner[validation]) & set(owner[test])
    assert sorted([*validation, *test]) == list(range(10))
    assert [len(rows) for rows in law.halves(users, 3)] == [3, 3]


def made_up(shift=0.0, spread=0.001):
    """Rows of all trainings, whose gains are `shift` above the law's predictions."""
    rows = []
    for place in law.places(SETTINGS, LOOKS):
        few, uls = place.data == FEW, place.algorithm == "uls"
        count = 512 / (place.group_size if uls else 1)
        sigma = (1.0 if not few else 8.0) * (4.0 / place.epsilon) * max(0.3, count / 512)
        norm = LOOK["norms"][str(place.group_size if uls else 1)][0]
        row = {**dataclasses.asdict(place), "expected_count": count, "noise_multiplier": sigma}
        row["norm"] = norm
        row |= law_claims.predicted(row)
        for seed, fresh, power in ((10, False, 0), (11, True, 0), (12, True, 0)):
            gain = row["predicted"] + shift + spread * (seed - 11.5)
            rows.append({**row, "seed": seed, "fresh": fresh, "power": power, "gain_test": gain})
    return rows


def verdicts(rows):
    return {what: held for what, held, _ in law_claims.check(rows)}


def test_a_law_that_is_off_is_refuted_and_one_that_holds_is_not():
    near = f"the law is off by less than {law_claims.ERROR:g} nats on average"
    covered = "17 of 20 gains are inside their 95% intervals"
    right = verdicts(made_up())
    assert right[near] is True and right[covered] is True
    assert right["with the rule's rate the law is off by less than 0.02 nats on average"] is True
    wrong = verdicts(made_up(shift=0.04))
    assert wrong[near] is False and wrong[covered] is False
    unsure = verdicts(made_up(spread=0.04))
    assert unsure[near] == "not shown"


def test_before_all_seeds_are_there_nothing_is_judged():
    assert set(verdicts(made_up()[:-1]).values()) == {None}


def test_what_the_law_says_grows_with_the_count_and_falls_with_noise_and_norm():
    at = {"expected_count": 512.0, "noise_multiplier": 4.0, "norm": 15.0}
    gain = law_claims.predicted(at)["predicted"]
    assert law_claims.predicted({**at, "expected_count": 1024.0})["predicted"] > gain
    for name in ("noise_multiplier", "norm"):
        assert law_claims.predicted({**at, name: 2 * at[name]})["predicted"] < gain
