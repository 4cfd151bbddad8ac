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
    ADJACENCY,
    MAX_PARAMETERS,
    Caveat,
    Evaluations,
    Fact,
    NoisePlan,
    Plan,
    SamplingPlan,
    calibrate,
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


@pytest.fixture
def users():
    found = users_of_sizes(SIZES)
    return SimpleNamespace(**vars(found), fingerprint="abc")


def data_of(users, *, public=True):
    return SimpleNamespace(train=users, metadata={"tokenizer": {"public": public}})


def privacy(**fields):
    return PrivacyConfig(**{"epsilon": 3.0, "num_steps": 8, "batch_size": 6, **fields})


def planned(algorithm, users, key, **fields):
    """(plan, method, completed settings) of a run."""
    completed, non_private = fill_defaults(algorithm, privacy(**fields), data_of(users))
    method = method_for(algorithm, completed, users, key)
    return make_plan(algorithm, completed, users, method, 10, non_private, "abc"), method, completed


@pytest.mark.parametrize("algorithm", Algorithm)
def test_delta_is_a_millionth_or_a_power_of_the_number_of_users(algorithm, users):
    many = SimpleNamespace(**vars(users_of_sizes([2] * 10**6)), fingerprint="many")
    settings = privacy()
    for users, expected in ((users, 1e-6), (many, 10**-6.6)):  # noqa: B020
        completed, non_private = fill_defaults(algorithm, settings, data_of(users))
        assert completed.delta == pytest.approx(expected)
        assert Caveat(Fact.DELTA) not in non_private  # N is public
        removed = dataclasses.replace(settings, adjacency=ADD_OR_REMOVE)
        completed, non_private = fill_defaults(algorithm, removed, data_of(users))
        named = non_private.count(Caveat(Fact.DELTA))
        assert named == (expected < 1e-6)


def test_the_group_size_of_els_is_the_median_users_and_named_as_not_private(users):
    completed, non_private = fill_defaults(Algorithm.ELS, privacy(), data_of(users))
    assert completed.group_size == 3
    assert non_private == [Caveat(Fact.GROUP_SIZE)]


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
def test_what_the_user_says_is_kept_and_not_named(algorithm, users):
    said = privacy(delta=1e-5, group_size=2)
    completed, non_private = fill_defaults(algorithm, said, data_of(users))
    assert completed == said
    assert non_private == []
    said = dataclasses.replace(said, adjacency=ADD_OR_REMOVE)
    assert fill_defaults(algorithm, said, data_of(users))[1] == [Caveat(Fact.COUNTS)]


@pytest.mark.parametrize("algorithm", Algorithm)
def test_the_calibrated_noise_meets_the_target_and_no_more(algorithm, users, key):
    plan, method, completed = planned(algorithm, users, key, delta=1e-5)
    spent = accounting.epsilon([(method.event(plan.noise_multiplier), 8)], completed.delta)
    assert 0.999 * 3.0 < spent <= 3.0


def test_a_target_that_cannot_be_met_is_the_users_mistake(users, key):
    completed, _ = fill_defaults(Algorithm.ULS, privacy(epsilon=1e-9, delta=1e-9), data_of(users))
    method = method_for(Algorithm.ULS, completed, users, key)
    with refuses("epsilon=1e-09"):
        calibrate(method, completed)


def test_the_plan_has_the_constants_of_the_paper(users, key):
    els, *_ = planned(Algorithm.ELS, users, key, group_size=4)
    uls, *_ = planned(Algorithm.ULS, users, key, group_size=3)
    assert (els.num_units, els.expected_count, els.sampling.prob) == (8 * 4, 6, 6 / 32)
    paper, *_ = planned(Algorithm.ELS, users, key, group_size=4, adjacency=ADD_OR_REMOVE)
    pool = sum(min(size, 4) for size in SIZES)
    assert (paper.num_units, paper.expected_count, paper.sampling.prob) == (pool, 6, 6 / pool)
    assert (uls.num_units, uls.expected_count, uls.sampling.prob) == (8, 2, 2 / 8)
    for plan in (els, uls):
        assert (plan.num_users, plan.num_examples, plan.data_seal) == (8, None, "abc")
    assert paper.num_examples == 56


@pytest.mark.parametrize("sampling", ["poisson", "cyclic"])
def test_the_plan_says_what_is_run_and_what_is_accounted(sampling, users, key):
    plan, *_ = planned(Algorithm.ULS, users, key, sampling=sampling, epsilon=math.inf)
    assert plan.sampling.kind == sampling


def test_a_seeded_run_is_labelled(users, key):
    plan, *_ = planned(Algorithm.ULS, users, key)
    assert key.seed is not None and plan.seeded and not plan.guarantee
    assert plan.epsilon_holds == "known-seed" and plan.caveats == (Caveat(Fact.KNOWN_SEED),)
    plan, *_ = planned(Algorithm.ULS, users, SecretKey.create())
    assert plan.guarantee and not plan.seeded and plan.epsilon_holds == ADJACENCY[ZERO_OUT]


def test_the_slack_of_the_noise_is_that_of_all_numbers_drawn(users, key):
    plan, *_ = planned(Algorithm.ULS, users, key)
    numbers = plan.num_steps * plan.num_parameters
    target = plan.target_epsilon, plan.delta
    assert plan.slack == accounting.slack(numbers, *target, CELL_ERRORS)
    assert 0 < plan.slack_after(1).epsilon < plan.slack.epsilon < 1e-6
    moved = dataclasses.replace(plan, clip_quantile=0.5)
    assert moved.slack.epsilon > plan.slack.epsilon  # the count is a number, too
    assert dataclasses.replace(plan, noise_multiplier=0.0).slack == (0.0, 0.0)


def test_an_epsilon_whose_slack_takes_all_of_delta_is_refused(users, key):
    """The paper's largest epsilon, 64, is none of these."""
    plan, *_ = planned(Algorithm.ULS, users, key, epsilon=64.0)
    assert plan.slack.delta < 1e-3 * plan.delta
    with refuses("epsilon=400.0"):
        planned(Algorithm.ULS, users, key, epsilon=400.0)


@pytest.mark.privacy
def test_a_trial_trains_no_more_parameters_than_its_slack_was_paid_for(users, key):
    completed, facts = fill_defaults(Algorithm.ULS, privacy(), data_of(users))
    method = method_for(Algorithm.ULS, completed, users, key)
    given = (Algorithm.ULS, completed, users, method)
    assert make_plan(*given, MAX_PARAMETERS, facts, "", trial=True).purpose == "trial"
    make_plan(*given, MAX_PARAMETERS + 1, facts, "")  # outside a selection it pays by itself
    with refuses("num_parameters=1000000001", says="at most 1,000,000,000"):
        make_plan(*given, MAX_PARAMETERS + 1, facts, "", trial=True)


def test_the_adjacency_is_named(users):
    """What the accountant and a sensitivity of C are about; replacing a user takes 2C."""
    for name, words in (
        (ZERO_OUT, "zero out one user's texts, the number of users being public"),
        (ADD_OR_REMOVE, "add or remove one user"),
    ):
        fields = {"epsilon": math.inf, "adjacency": name}
        plan, *_ = planned(Algorithm.ULS, users, SecretKey.create(), **fields)
        assert plan.adjacency == name and plan.epsilon_holds == words
        head = ledger_head(plan, config_sha256="", key_seal="")
        assert head["adjacency"] == claimed_fields(plan, 1.0, "")["adjacency"] == words


@pytest.mark.parametrize("clipping, sensitivity", [("normalised", 1.0), ("plain", 0.5)])
def test_the_sensitivity_is_that_of_the_clipping(clipping, sensitivity, users, key):
    fields = {"clipping": clipping, "clip_norm": 0.5, "epsilon": math.inf}
    plan, *_ = planned(Algorithm.ULS, users, key, **fields)
    assert (plan.clip.norm, plan.clip.sensitivity) == (0.5, sensitivity)


WAYS = {
    "sampling": [
        SamplingPlan("poisson", prob=0.25),
        SamplingPlan("cyclic", prob=0.25, bands=2),
        SamplingPlan("cyclic", prob=0.25),
        SamplingPlan("allocation", prob=0.25, participations=2),
    ],
    "noise": [NoisePlan(), NoisePlan("correlated", 3)],
    "purpose": ["release", "trial", "audit"],
    "planted": [None, {"gradient": 3, "text": 0}],
    "shared": [None, SharedTexts(9, 2, "seal")],
    "evaluations": [None, Evaluations(1.0, 1e-5, 2.0, 5, 3, 8, 2, 4.5, "seal")],
    "drawn_once": ["", "seal"],
    "loss_bound": [None, 2.0],
}


@pytest.mark.parametrize("name", WAYS)
def test_every_option_comes_back_from_json(name, users, key):
    plan, *_ = planned(Algorithm.ULS, users, key)
    for way in WAYS[name]:
        other = dataclasses.replace(plan, **{name: way})
        fields = json.loads(json.dumps(other.as_dict(), allow_nan=False))
        assert Plan.from_dict(fields) == other


ANOTHERS = [  # what belongs to another way of drawing, or is none of an option
    ("sampling", {"kind": "poisson", "prob": 0.5, "bands": 4}),
    ("sampling", {"kind": "poisson", "prob": 0.5, "participations": 2}),
    ("sampling", {"kind": "poisson", "prob": 0.5, "accounted": "cyclic"}),
    ("sampling", {"kind": "bernoulli", "prob": 0.5}),
    ("noise", {"kind": "white"}),
    ("noise", {"kind": "independent", "bands": 2}),
    ("purpose", "rehearsal"),
    ("planted", {"text": "many"}),
    ("non_private", ["no noise"]),
    ("non_private", [{"fact": "a fact"}]),
    ("shared", {"kept": 3}),
    ("adjacency", "replace-one"),
    ("delta", "1e-5"),
    ("num_steps", 8.5),
    ("seeded", 1),
]


@pytest.mark.parametrize("name, value", ANOTHERS)
def test_a_plan_of_parts_that_do_not_go_together_is_not_read(name, value, users, key):
    plan, *_ = planned(Algorithm.ULS, users, key)
    with pytest.raises(ValueError, match=rf"^{name}(\.[a-z_0-9]+)*: .*$"):
        Plan.from_dict({**plan.as_dict(), name: value})


def test_a_plan_with_a_field_too_few_or_too_many_is_not_read(users, key):
    plan, *_ = planned(Algorithm.ULS, users, key, epsilon=math.inf)
    fields = plan.as_dict()
    with pytest.raises(ValueError, match="^sigma: "):
        Plan.from_dict({**fields, "sigma": 1.0})
    for name in fields:
        with pytest.raises(ValueError, match=f"^{name}: "):
            Plan.from_dict({each: fields[each] for each in fields if each != name})
