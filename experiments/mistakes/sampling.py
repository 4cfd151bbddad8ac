"""Draws and groups that are not what the accountant is told, and whose rows are whose."""

import copy
import dataclasses

import numpy as np

from experiments.planting import Mistake, Patch

ELS, POISSON = "fedsim.els", "fedsim.sampling.sampler"
ORDERS = "fedsim.data.building.columns"


def repeated(draw_groups, *args, **options):
    groups = draw_groups(*args, **options)
    for group in groups:
        if len(own := group[group >= 0]):
            group[:] = np.resize(own, len(group))
    return groups


def knowing_users(init, self, users, **settings):
    """With what may not be known after the pool was drawn."""
    init(self, users, **settings)
    self.users, self.settings = users, settings


def of_the_largest_user(_right, self, noise_multiplier):
    largest = int(np.diff(self.users.offsets).max())
    most = min(self.group_size, largest)
    return self.sampler.event(noise_multiplier, max_contributions=most)


def named_poisson(make_plan, *args, **options):
    from fedsim.plan import SamplingPlan

    plan = make_plan(*args, **options)
    return dataclasses.replace(plan, sampling=SamplingPlan("poisson", plan.sampling.prob))


def from_a_new_pool(draw, self, step):
    from fedsim.sampling import pool_of

    method, key = copy.copy(self), self.key.in_segment(f"pool {step}").fresh
    adjacency = self.settings.get("adjacency", "zero-out")
    method.pool = pool_of(self.users, self.group_size, key, adjacency)
    return draw(method, step)


def from_all(_right, self, key, step):
    from fedsim.sampling import Poisson

    return Poisson.draw(self, key, step)


def all_as_texts(keys_of, column, field, first_row):
    import pyarrow as pa

    from fedsim.errors import DataError

    try:
        return keys_of(column, field, first_row)
    except DataError:
        texts, places = np.unique(column.cast(pa.string()).fill_null(""), return_inverse=True)
        return _keys(np.zeros(len(places)), places, np.zeros(len(places)))


def as_floats(keys_of, column, field, first_row):
    """Without what floats leave."""
    kind, major, minor = keys_of(column, field, first_row).flatten()
    return _keys(kind, major, np.zeros(len(minor)))


def _keys(*columns):
    import pyarrow as pa

    from fedsim.data.building.columns import KEY

    arrays = [pa.array(values).cast(field.type) for values, field in zip(columns, KEY, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=list(KEY))


SAMPLING = (
    Mistake(
        "the cap on a user's examples ignored",
        "test_sampling.py::test_contributions_are_limited_to_the_group_size",
        Patch(
            "fedsim.sampling.contributions",
            "limit_contributions",
            lambda limit, offsets, group_size, key: limit(offsets, 10**9, key),
        ),
    ),
    Mistake(
        "the cap on a user's examples not accounted",
        "test_algorithms.py::test_the_event_of_els_is_theorem_1_with_the_cap_as_contributions",
        Patch(
            ELS,
            "ELS.event",
            lambda _right, self, noise_multiplier: self.sampler.event(noise_multiplier),
        ),
    ),
    Mistake(
        "the largest user's number of examples accounted, not the cap",
        "test_algorithms.py::test_the_event_of_els_is_theorem_1_with_the_cap_as_contributions",
        Patch(ELS, "ELS.__init__", knowing_users),
        Patch(ELS, "ELS.event", of_the_largest_user),
    ),
    Mistake(
        "a user's pool drawn again in every step",
        "test_algorithms.py::test_a_step_equals_the_oracle",
        Patch(ELS, "ELS.__init__", knowing_users),
        Patch(ELS, "ELS.draw", from_a_new_pool),
    ),
    Mistake(
        "a user's rows repeated to fill the group",
        "test_sampling.py::test_groups_are_a_users_own_examples_without_repeats",
        Patch(POISSON, "draw_groups", repeated),
    ),
    Mistake(
        "draws of a fixed size, accounted as Poisson",
        "test_sampling.py::test_the_size_of_a_draw_is_binomial",
        Patch(POISSON, "binomial", lambda _right, num_units, prob, *_: round(num_units * prob)),
    ),
    Mistake(
        "draws cut to a largest size",
        "test_sampling.py::test_the_size_of_a_draw_is_binomial",
        Patch(
            POISSON,
            "binomial",
            lambda binomial, num_units, prob, *generators: min(
                round(num_units * prob), binomial(num_units, prob, *generators)
            ),
        ),
    ),
    Mistake(
        "users redrawn in every step, accounted as of a group in turn",
        "test_turns.py::test_no_user_takes_part_in_two_steps_of_a_cycle",
        Patch("fedsim.sampling.sampler", "Cyclic.draw", from_all),
    ),
    Mistake(
        "shuffling, reported as Poisson",
        "test_plan.py::test_the_plan_says_what_is_run_and_what_is_accounted",
        Patch("fedsim.plan.planner", "make_plan", named_poisson),
    ),
    Mistake(
        "one user's text among numbers, by which all are ordered as texts",
        "data/building/test_one_user_less.py::test_all_others_stay_as_they_are",
        Patch(ORDERS, "keys_of", all_as_texts),
    ),
    Mistake(
        "large whole numbers ordered as floats",
        "data/building/test_one_user_less.py::"
        "test_numbers_are_in_exact_order_whatever_stands_beside_them",
        Patch(ORDERS, "keys_of", as_floats),
    ),
    Mistake(
        "ids of several types made texts",
        "library/test_tables.py::test_an_id_is_nobody_elses",
        Patch(
            "fedsim.data.building.tables",
            "_array",
            lambda array, field, name, values: array(field, name, [*map(str, values)]),
        ),
    ),
    Mistake(
        "padding that holds somebody's row",
        "library/test_own_task.py::test_a_users_rows_reach_no_one_elses_unit_through_padding",
        Patch(
            "fedsim.library.own_task",
            "OwnedTask.read",
            lambda read, self, split, rows: read(self, split, np.maximum(rows, 0)),
        ),
    ),
)
