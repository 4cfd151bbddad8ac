"""Noise that is too little, the same again, or of another sensitivity; evaluations with it."""

import copy
import time

import numpy as np

from experiments.planting import Mistake, Patch

KEYS, MECHANISM = "fedsim.keys", "fedsim.mechanism"
INDEPENDENT = "fedsim.noise.independent"


def as_everyone(derive, self, purpose, index):
    return derive(type(self)(bytes(32)), purpose, index)


def in_coarser_cells(add_gaussian, sums, *, stddev, **options):
    """Rounded to what the largest number of the sum says."""
    from fedsim.noise import release_shift

    largest = max(float(np.abs(leaf).max(initial=0)) for leaf in sums)
    cell = 2 ** (release_shift(stddev + largest) - release_shift(stddev))
    return [leaf // cell * cell for leaf in add_gaussian(sums, stddev=stddev, **options)]


def of_the_first_layer(generator, self, purpose, *index):
    if purpose == "noise":
        step, _, *block = index
        index = (step, 0, *block)
    return generator(self, purpose, *index)


def of_the_draw(generator, self, purpose, *index):
    if purpose == "noise":
        step, *place = index
        purpose, index = "units", (step, *(place if any(place) else ()))
    return generator(self, purpose, *index)


def with_option(name, value):
    """A function whose keyword argument of this name is value(options)."""
    return lambda right, *args, **options: right(*args, **{**options, name: value(options)})


def over_realised(count):
    """Of a method whose expected count has this name."""

    def gradient(right, self, params, step, *args, rows=None, **options):
        rows = self.draw(step) if rows is None else rows
        method = copy.copy(self)
        setattr(method, count, max(1, len(rows)))
        return right(method, params, step, *args, rows=rows, **options)

    return gradient


NOISE_AND_SENSITIVITY = (
    Mistake(
        "noise that everyone can draw",
        "test_mechanism.py::test_streams_are_aes_in_counter_mode_keyed_by_hkdf",
        Patch(KEYS, "SecretKey._derive", as_everyone),
    ),
    Mistake(
        "a lattice that depends on the data",
        "test_mechanism.py::test_what_is_released_is_a_rounding_of_the_sum_plus_whole_noise",
        Patch(INDEPENDENT, "add_gaussian", in_coarser_cells),
    ),
    Mistake(
        "a seal that tells whether a seed was guessed",
        "test_keys.py::test_a_seal_does_not_follow_from_the_seed",
        Patch(
            KEYS,
            "SecretKey.__init__",
            lambda init, self, secret, seed=None, sealing=None: init(
                self, secret, seed, sealing or secret
            ),
        ),
    ),
    Mistake(
        "a tenth of the noise",
        "test_mechanism.py::test_the_noise_has_the_standard_deviation_of_the_sum_over_the_count",
        Patch(INDEPENDENT, "gaussian", lambda gaussian, rng, out: 0.1 * gaussian(rng, out)),
    ),
    Mistake(
        "noise of the mean, divided once more",
        "test_mechanism.py::test_the_noise_has_the_standard_deviation_of_the_sum_over_the_count",
        Patch(
            MECHANISM,
            "noisy_mean",
            with_option("noise_multiplier", lambda o: o["noise_multiplier"] / o["count"]),
        ),
    ),
    Mistake(
        "the same noise for all layers",
        "test_mechanism.py::test_the_noise_of_leaves_and_steps_is_independent",
        Patch(KEYS, "SecretKey.generator", of_the_first_layer),
    ),
    Mistake(
        "the same noise in every step",
        "test_algorithms.py::test_the_noise_is_fresh_in_every_step_and_repeated_when_a_step_is",
        Patch(MECHANISM, "noisy_mean", with_option("step", lambda _: 0)),
    ),
    Mistake(
        "fresh noise when a step is run again",
        "test_algorithms.py::test_the_noise_is_fresh_in_every_step_and_repeated_when_a_step_is",
        Patch(MECHANISM, "noisy_mean", with_option("step", lambda _: time.time_ns())),
    ),
    Mistake(
        "noise and draws from one random stream",
        "test_keys.py::test_noise_and_sampling_are_independent_streams",
        Patch(KEYS, "SecretKey.generator", of_the_draw),
    ),
    Mistake(
        "sensitivity C after scaling to norm 1",
        "test_algorithms.py::test_the_noise_has_the_standard_deviation_c_sigma_over_the_expected_count",
        Patch("fedsim.clipping.contribution", "Clip.sensitivity", lambda _right, self: self.norm),
    ),
    Mistake(
        "noise of add-or-remove, called replace-one",
        "test_plan.py::test_the_adjacency_is_named",
        Patch(
            "fedsim.plan.plan",
            "ADJACENCY",
            lambda words: {**words, "add-or-remove": "replace one user"},
        ),
    ),
    Mistake(
        "division by the realised number",
        "test_algorithms.py::test_the_sum_is_divided_by_the_expected_count_whatever_was_drawn",
        Patch("fedsim.els", "ELS.gradient", over_realised("expected_batch_size")),
        Patch("fedsim.uls", "ULS.gradient", over_realised("expected_cohort_size")),
    ),
    Mistake(
        "a clip norm that moves, for no extra noise on the gradient",
        "clipping/test_adaptive.py::test_the_gradient_gets_at_most_one_percent_more_noise",
        Patch(
            MECHANISM,
            "AdaptiveClip.gradient_noise_multiplier",
            lambda _right, self: self.noise_multiplier,
        ),
    ),
    Mistake(
        "a clip norm that follows the count without noise",
        "clipping/test_adaptive.py::test_the_count_is_released_with_its_noise",
        Patch(MECHANISM, "noisy_number", lambda _right, total, stddev, rng: total),
    ),
)

HELD_OUT = "budget/test_evaluation_in_training.py::"
EVALUATIONS = (
    Mistake(
        "a held-out loss without the noise that is claimed",
        HELD_OUT + "test_what_is_released_has_the_noise_of_the_plan_and_a_user_moves_it_by_little",
        Patch("fedsim.noise.independent", "noisy_number", lambda _right, total, stddev, rng: total),
    ),
    Mistake(
        "all evaluations of a training for the price of one",
        HELD_OUT + "test_the_plan_pays_for_every_evaluation_that_there_can_be",
        Patch(
            "fedsim.plan.planner",
            "noise_of",
            lambda noise_of, epsilon, delta, count: noise_of(epsilon, delta, 1),
        ),
    ),
)
