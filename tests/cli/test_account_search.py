"""`account` and `calibrate` over all ranges of their inputs: an answer that is right, or a line."""

import contextlib
import io
import warnings

import pytest
from refused import refuses

from fedsim.cli.account import Accounted, account, calibrate
from fedsim.errors import ConfigError


def run(command, fields):
    """What it found, or its one line; everything else is a fault."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return command(Accounted(**fields))[0]
        except ConfigError as error:
            assert "\n" not in str(error) and "=" in str(error), error
            return str(error)


@pytest.mark.privacy
def test_noise_is_found_beside_a_private_median():
    given = dict(algorithm="els", num_steps=100, sampling_prob=0.01, group_size=8, delta=1e-6)
    alone, beside = (
        run(calibrate, {**given, "epsilon": 4.0, **more})["noise_multiplier"]
        for more in ({}, {"before": 0.4})
    )
    assert alone < beside < 1.1 * alone
    spent = run(account, {**given, "noise_multiplier": beside, "before": 0.4})["epsilon"]
    assert 4 * (1 - 1e-3) < spent <= 4 < spent + 0.4
    with refuses("before=4.0", says="in (0, epsilon)"):
        calibrate(Accounted(**given, epsilon=4.0, before=4.0))


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"group_size": 9_999_999_999}, "group_size=9999999999"),
        ({"max_shared_groups": 10**10, "algorithm": "uls"}, "max_shared_groups=10000000000"),
        ({"delta": 1.5e-15, "num_steps": 10**7}, "delta=1.5e-15"),
        ({"noise_multiplier": 1.0}, "noise_multiplier=1.0"),
        ({"delta": None}, "delta=None"),
    ],
)
def test_what_is_beyond_all_ranges_is_refused_before_a_search(changed, what):
    given = dict(algorithm="els", epsilon=3.0, sampling_prob=0.01, delta=1e-6, num_steps=2)
    with refuses(what):
        calibrate(Accounted(**given | changed))
