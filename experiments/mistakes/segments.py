"""What a run that is resumed, copied or killed gives away: a mistake for each sentence of
docs/theory/segments.md."""

from experiments.planting import Mistake, Patch

KEYS, LEDGER, SAMPLER = "fedsim.keys", "fedsim.run.ledger", "fedsim.sampling.sampler"
SEGMENTS, ADMISSION = "run/test_segments.py::", "budget/test_admission.py::"
DRAWN = SEGMENTS + "test_what_steps_draw_takes_the_nonce_and_what_is_drawn_once_does_not"
REFUSED = SEGMENTS + "test_a_segment_that_would_use_an_index_or_a_nonce_again_is_refused"
HISTORIES = (
    SEGMENTS + "test_no_history_uses_an_index_or_a_noise_twice_or_costs_more_than_is_counted"
)
HELD_OUT = "budget/test_evaluation_in_training.py::"


def of_the_run(key):
    """The key of a run as it is without segments."""
    return type(key)(key._secret, key.seed, key._sealing)


def across_segments(call, self, sums, *, stddev, key, step):
    if self._next:
        self._next = (step, key, *self._next[2:])
    return call(self, sums, stddev=stddev, key=key, step=step)


def if_as_long(expect_begins, self, chains, *places):
    if len(chains) > self.count:
        expect_begins(self, chains, *places)


def forgetful(init, self, run_dir):
    init(self, run_dir)
    self.losses = {}


SEGMENT = (
    Mistake(
        "an index, or a nonce, that is used again",
        REFUSED,
        Patch(LEDGER, "out_of_order", lambda _right, segment, before, num_steps: ""),
    ),
    Mistake(
        "noise of the key and the index alone after a crash",
        SEGMENTS + "test_two_copies_that_two_ledgers_count_share_no_noise",
        Patch(KEYS, "SecretKey.in_segment", lambda _right, self, nonce, first=0: self),
    ),
    Mistake(
        "a nonce that is the same in every copy",
        SEGMENTS + "test_two_copies_that_two_ledgers_count_share_no_noise",
        Patch(KEYS, "SecretKey.nonce", lambda _right, self, context: f"{len(context):032x}"),
    ),
    Mistake(
        "Poisson draws that do not take the nonce",
        DRAWN,
        Patch(
            SAMPLER,
            "poisson_subset",
            lambda draw, num_units, prob, key, step: draw(num_units, prob, of_the_run(key), step),
        ),
    ),
    Mistake(
        "groups that are drawn anew in each segment",
        DRAWN,
        Patch(SAMPLER, "_groups", lambda draw, sampler, key: draw(sampler, key.fresh)),
    ),
    Mistake(
        "turns of a window that are drawn anew in each segment",
        DRAWN,
        Patch(
            SAMPLER, "_places", lambda draw, sampler, key, number: draw(sampler, key.fresh, number)
        ),
    ),
    Mistake(
        "noise taken back that another segment added",
        SEGMENTS + "test_correlated_noise_takes_back_rows_of_its_own_segment_alone",
        Patch("fedsim.noise.correlated", "Correlated.__call__", across_segments),
    ),
    Mistake(
        "lost steps that nobody counts",
        SEGMENTS + "test_what_is_lost_adds_up_along_the_checkpoints",
        Patch(LEDGER, "lost_steps", lambda _right, segments, steps: 0),
    ),
    Mistake(
        "a step shown before the ledger of the data has its mark",
        HISTORIES,
        Patch(LEDGER, "Ledger._append", lambda _right, self, line: self._log.append(line)),
    ),
    Mistake(
        "an older copy of a killed run taken for the run",
        ADMISSION + "test_an_older_copy_of_a_killed_run_is_refused",
        Patch("fedsim.budget.ledger", "Head.expect_begins", if_as_long),
    ),
    Mistake(
        "another held-out loss for the same step after a crash",
        HELD_OUT + "test_a_step_is_released_once",
        Patch("fedsim.training.private_evaluation", "Evaluated.__init__", forgetful),
    ),
    Mistake(
        "an evaluation shown before the ledger of the data has it",
        HELD_OUT + "test_a_step_is_released_once",
        Patch(
            "fedsim.training.private_evaluation",
            "noisy_evaluate",
            lambda begin, *args, again=False: begin(
                *args[:-1], lambda count, chain: None, again=again
            ),
        ),
    ),
)
