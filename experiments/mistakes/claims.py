"""Claims that say too little, and what a run that is resumed, copied or killed gives away."""

import dataclasses
import re
from pathlib import Path
from unittest import mock

from experiments.planting import Mistake, Patch

MAKING, PLANNED, TRAINER = (
    "fedsim.plan.planner",
    "fedsim.training.prepare",
    "fedsim.training.trainer",
)
DIRECTORY = "fedsim.run.directory"


def of_half_the_steps(calibrate, method, privacy):
    half = dataclasses.replace(privacy, num_steps=-(-privacy.num_steps // 2))
    return calibrate(method, half)


def as_before(expect_same, stored, now):
    identity = dataclasses.replace(stored.identity, data_seal=now.identity.data_seal)
    return expect_same(stored, dataclasses.replace(stored, identity=identity))


def with_seed(as_dict, self):
    record = as_dict(self)
    return {**record, "run": {**record["run"], "seed": self.run.seed}}


def without_what_is_known(claim, released):
    said = claim(released)
    hidden = released.plan.adjacency == "add-or-remove"
    return re.sub("taking as known [^,]*", "of course", said) if hidden else said


def shown(charge_of, entry):
    """Of a run that has not ended: what its directory says."""
    from fedsim.run import ledger as run_ledger

    charge = charge_of(entry)
    if entry.outcome:
        return charge
    released = run_ledger.phases(run_ledger.read(Path(entry.place)))
    return dataclasses.replace(charge, released=released)


CLAIMS = (
    Mistake(
        "noise calibrated for half of the steps",
        "test_plan.py::test_the_calibrated_noise_meets_the_target_and_no_more",
        Patch(MAKING, "calibrate", of_half_the_steps),
    ),
    Mistake(
        "epsilon copied from the target",
        "test_train.py::test_epsilon_comes_from_the_ledger",
        Patch(TRAINER, "claimed_epsilon", lambda _right, directory, plan: plan.target_epsilon / 2),
    ),
    Mistake(
        "a run that may be stopped by looking at it, claimed for the steps until there",
        "trust/test_stopping.py::test_no_rule_of_stopping_gets_more_than_the_claim",
        Patch("fedsim.plan.plan", "accounted_events", lambda _right, plan, released: released),
    ),
    Mistake(
        "a stopped run that the budget counts only as far as it came",
        "budget/test_spending.py"
        "::test_a_run_that_was_stopped_counts_whole_where_one_may_have_looked",
        Patch("fedsim.budget.spending", "RunCost.reserved", lambda _right, self: self.released),
    ),
    Mistake(
        "an add-or-remove claim that hides what it takes as known",
        "trust/test_report.py::test_the_claim_says_what_is_taken_as_known",
        Patch("fedsim.trust.claim", "claim", without_what_is_known),
    ),
    Mistake(
        "steps that begin, whatever their noise makes them cost",
        "test_train.py"
        "::test_noise_that_costs_more_than_was_asked_for_ends_a_run_before_its_first_step",
        Patch(MAKING, "expect_affordable", lambda _right, plan, events: None),
    ),
    Mistake(
        "an older copy of a private selection that goes on",
        "budget/test_admission.py::test_what_has_no_ledger_of_its_own_is_released_once",
        Patch(
            "fedsim.budget.ledger",
            "Head.expect_begins",
            lambda right, self, chains, *places: right(self, chains, *places) if chains else None,
        ),
    ),
    Mistake(
        "other settings accepted on resume",
        "run/test_directory.py::test_a_changed_setting_is_refused_by_name",
        Patch(DIRECTORY, "expect_same", as_before),
    ),
    Mistake(
        "other data accepted on resume",
        "test_train.py::test_other_data_is_refused_on_resume",
        Patch(
            DIRECTORY,
            "expect_same",
            lambda expect_same, stored, now: expect_same(
                stored, dataclasses.replace(now, identity=stored.identity)
            ),
        ),
    ),
    Mistake(
        "the key in whatever prints it",
        "test_keys.py::test_the_key_is_in_no_representation",
        Patch(
            "fedsim.keys",
            "SecretKey.__repr__",
            lambda _right, self: f"SecretKey({self._secret.hex()})",
        ),
    ),
    Mistake(
        "the seed among the settings of the run",
        "test_train.py::test_the_key_is_in_no_file_but_its_own",
        Patch(DIRECTORY, "StoredRun.as_dict", with_seed),
    ),
    Mistake(
        "sizes of draws in a checkpoint",
        "test_train.py"
        "::test_what_may_be_published_has_no_sizes_of_draws_and_no_loss_of_held_out_users",
        Patch(
            "fedsim.run.checkpoint",
            "_published",
            lambda published, state: {
                **published(state),
                "gradients_computed": state["gradients_computed"],
            },
        ),
    ),
)

ADMISSION, DRAWS = "budget/test_admission.py::", "test_other_draws.py::"
COPIES = (
    Mistake(
        "a killed run counted with what its directory shows",
        ADMISSION + "test_a_killed_run_counts_whole_whatever_its_directory_shows",
        Patch("fedsim.budget.spending", "charge_of", shown),
    ),
    Mistake(
        "turns drawn anew by other packages",
        DRAWS
        + "test_turns_that_other_packages_draw_otherwise_are_refused_and_the_same_ones_are_not",
        Patch(PLANNED, "drawn_once", lambda _right, method, num_steps, key: mock.ANY),
    ),
    Mistake(
        "the same people under other ids, of whom the ledger of the data does not warn",
        "budget/test_budget_ledger.py::test_users_who_look_like_those_of_a_counted_run_are_named",
        Patch("fedsim.budget.ledger", "_looks", lambda _right, ids: [*ids]),
    ),
    Mistake(
        "a group size drawn before it is paid for",
        "test_dry_run.py::"
        "test_a_private_draw_is_counted_before_anything_is_refused_that_follows_from_it",
        Patch(PLANNED, "_pay", lambda _right, opened, settings, request: None),
    ),
)
