"""What a run fixes before its first step, and what of it was read off the data."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
from problems import users_of_sizes
from refused import refuses

from fedsim import accounting
from fedsim.config import ADD_OR_REMOVE, ZERO_OUT, Algorithm, PrivacyConfig
from fedsim.keys import SecretKey
from fedsim.noise import CELL_ERRORS
from fedsim.plan import (
    MAX_PARAMETERS,
    Caveat,
    Evaluations,
    Fact,
    NoisePlan,
    Plan,
    SamplingPlan,
    claimed_fields,
    fill_defaults,
    ledger_head,
    make_plan,
    method_for,
    with_group_size,
)
from fedsim.plan.plan import SharedTexts
from fedsim.sampling import rank_error

SIZES = [1, 2, 2, 3, 5, 9, 30, 4]  # median 3.5, 56 examples
USERS = users_of_sizes(SIZES)


def privacy(**fields):
    return PrivacyConfig(**{"epsilon": 3.0, "num_steps": 8, "batch_size": 6, **fields})


def completed(algorithm, users=USERS, **fields):
    data = SimpleNamespace(train=users, metadata={"tokenizer": {"public": True}})
    return fill_defaults(algorithm, privacy(**fields), data)


def planned(algorithm, key, num_parameters=10, *, trial=False, **fields):
    settings, facts = completed(algorithm, **fields)
    method = method_for(algorithm, settings, USERS, key)
    return make_plan(algorithm, settings, USERS, method, num_parameters, facts, "abc", trial=trial)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_what_is_left_out_has_defaults_and_what_was_read_off_the_data_is_named(algorithm):
    many = users_of_sizes([2] * 10**6)
    for users, delta in ((USERS, 1e-6), (many, 10**-6.6)):
        settings, facts = completed(algorithm, users)
        assert settings.delta == pytest.approx(delta)
        assert settings.group_size == (1 if algorithm == "uls" else 3 if users is USERS else 2)
        assert facts == [Caveat(Fact.GROUP_SIZE)] * (algorithm == "els")  # N is public
        _, facts = completed(algorithm, users, adjacency=ADD_OR_REMOVE)
        assert facts.count(Caveat(Fact.DELTA)) == (delta < 1e-6)
    said = {"delta": 1e-5, "group_size": 2}
    assert completed(algorithm, **said) == (privacy(**said), [])
    assert completed(algorithm, **said, adjacency=ADD_OR_REMOVE)[1] == [Caveat(Fact.COUNTS)]


@pytest.mark.privacy
@pytest.mark.parametrize(
    "num_users, epsilon, share, public",
    [
        (10_000, 1.0, 0.02, None),
        (1000, 1.0, 4 * rank_error(1.0) / 1000, None),
        (100, 8.0, 4 * rank_error(1.0) / 100, None),
        (100, 1.0, None, 1),  # a median of so few would take more than a tenth of epsilon
        (5, 1.0, None, 2),  # or there would be no room for the batch
        (100, math.inf, None, None),
    ],
)
def test_the_group_size_of_els_is_private_by_default(num_users, epsilon, share, public):
    users = users_of_sizes([3] * num_users)
    found = with_group_size(Algorithm.ELS, privacy(epsilon=epsilon), users)
    assert (found.group_size_epsilon, found.group_size) == (pytest.approx(share), public)
    given = privacy(epsilon=epsilon, group_size=7)
    assert with_group_size(Algorithm.ELS, given, users) == given
    assert with_group_size(Algorithm.ULS, privacy(), users) == privacy()


@pytest.mark.parametrize("algorithm", Algorithm)
def test_the_calibrated_noise_meets_the_target_and_no_more(algorithm, key):
    plan = planned(algorithm, key, delta=1e-5)
    assert 0.999 * 3.0 < accounting.epsilon([(plan.event(), 8)], 1e-5) <= 3.0
    with refuses("epsilon=1e-09"):
        planned(algorithm, key, epsilon=1e-9, delta=1e-9)


def test_the_plan_has_the_constants_of_the_paper(key):
    els = planned(Algorithm.ELS, key, group_size=4)
    uls = planned(Algorithm.ULS, key, group_size=3)
    paper = planned(Algorithm.ELS, key, group_size=4, adjacency=ADD_OR_REMOVE)
    pool = sum(min(size, 4) for size in SIZES)
    for plan, units, count in ((els, 8 * 4, 6), (paper, pool, 6), (uls, 8, 2)):
        assert (plan.num_units, plan.expected_count) == (units, count)
        assert plan.sampling.prob == count / units
        assert (plan.num_users, plan.data_seal) == (8, "abc")
    assert (els.num_examples, uls.num_examples, paper.num_examples) == (None, None, 56)


@pytest.mark.parametrize("sampling", ["poisson", "cyclic"])
def test_the_plan_says_what_is_run_and_what_is_accounted(sampling, key):
    plan = planned(Algorithm.ULS, key, sampling=sampling, epsilon=math.inf)
    assert plan.sampling.kind == sampling


def test_the_slack_of_the_noise_is_that_of_all_numbers_drawn(key):
    plan = planned(Algorithm.ULS, key)
    numbers = plan.num_steps * plan.num_parameters
    assert plan.slack == accounting.slack(numbers, plan.target_epsilon, plan.delta, CELL_ERRORS)
    assert 0 < plan.slack_after(1).epsilon < plan.slack.epsilon < 1e-6
    moved = dataclasses.replace(plan, clip_quantile=0.5)
    assert moved.slack.epsilon > plan.slack.epsilon  # the count is a number, too
    assert dataclasses.replace(plan, noise_multiplier=0.0).slack == (0.0, 0.0)


@pytest.mark.privacy
def test_a_trial_trains_no_more_parameters_than_its_slack_was_paid_for(key):
    assert planned(Algorithm.ULS, key, MAX_PARAMETERS, trial=True).purpose == "trial"
    planned(Algorithm.ULS, key, MAX_PARAMETERS + 1)  # outside a selection it pays by itself
    with refuses("num_parameters=1000000001", says="at most 1,000,000,000"):
        planned(Algorithm.ULS, key, MAX_PARAMETERS + 1, trial=True)


def test_the_adjacency_is_named():
    """What the accountant and a sensitivity of C are about; replacing a user takes 2C."""
    for name, words in (
        (ZERO_OUT, "zero out one user's texts, the number of users being public"),
        (ADD_OR_REMOVE, "add or remove one user"),
    ):
        plan = planned(Algorithm.ULS, SecretKey.create(), epsilon=math.inf, adjacency=name)
        assert plan.adjacency == name and plan.epsilon_holds == words
        head = ledger_head(plan, config_sha256="", key_seal="")
        assert head["adjacency"] == claimed_fields(plan, 1.0, "")["adjacency"] == words


WAYS = [
    {"sampling": SamplingPlan("cyclic", prob=0.25, bands=2), "noise": NoisePlan("correlated", 3)},
    {"sampling": SamplingPlan("allocation", prob=0.25, participations=2), "loss_bound": 2.0},
    {"purpose": "audit", "planted": {"gradient": 3}, "shared": SharedTexts(9, 2)},
    {"evaluations": Evaluations(1.0, 1e-5, 2.0, 5, 3, 8, 2, 4.5, "seal"), "drawn_once": "seal"},
]


@pytest.mark.parametrize("way", WAYS)
def test_every_option_comes_back_from_json(way, key):
    plan = dataclasses.replace(planned(Algorithm.ULS, key), **way)
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict(), allow_nan=False))) == plan


@pytest.mark.parametrize(
    "name, value",
    [
        ("sampling", {"kind": "poisson", "prob": 0.5, "bands": 4}),
        ("sampling", {"kind": "poisson", "prob": 0.5, "participations": 2}),
        ("sampling", {"kind": "poisson", "prob": 0.5, "accounted": "cyclic"}),
        ("noise", {"kind": "independent", "bands": 2}),
        ("purpose", "rehearsal"),
        ("non_private", [{"fact": "a fact"}]),
        ("delta", "1e-5"),
        ("seeded", 1),
        ("sigma", 1.0),
    ],
)
def test_a_plan_of_parts_that_do_not_go_together_is_not_read(name, value, key):
    fields = planned(Algorithm.ULS, key).as_dict()
    with pytest.raises(ValueError, match=rf"^{name}(\.[a-z_0-9]+)*: .*$"):
        Plan.from_dict({**fields, name: value})
    if name in fields:
        with pytest.raises(ValueError, match=f"^{name}: "):
            Plan.from_dict({each: fields[each] for each in fields if each != name})
