"""`account` and `calibrate` over all ranges of their inputs: an answer that is right, or a line."""

import contextlib
import io
import math
import random
import warnings

import pytest
from refused import refuses

from fedsim.cli.account import TO_ACCOUNT, TO_CALIBRATE, Accounted, solve
from fedsim.errors import ConfigError

ODD = {
    "delta": (1e-15, 1.000001e-15, 5e-324, 0.5, 1e-14, 0.0, 1.0, math.nan, 1 - 2**-53, 1 - 1e-14),
    "epsilon": (0.0, 1e-300, 700.0, 710.0, 1e9, 1e300, math.inf, math.nan, -1.0),
    "num_steps": (-1, 0, 1, 2, 10**7, 10**7 + 1, 10**20),
    "sampling_prob": (1e-12, 1.0, 1 - 2**-53, 0.0, 1.1, math.nan, 5e-324),
    "noise_multiplier": (1e-10, 1e10, 1e-5, 0.0, -1.0, math.inf, math.nan),
    "group_size": (0, 1, 2**20, 10**7, 9_999_999_999, 10**30),
    "max_shared_groups": (-1, 10**7, 10**10),
    "before": (0.0, 1e-300, 800.0, 1e4, 1e300, math.inf),
    "bands": (0, 1, 10**6, 10**9),
}
USUAL = {
    "delta": (1e-12, 1e-2),
    "epsilon": (1e-3, 1e3),
    "num_steps": (1, 3000),
    "sampling_prob": (1e-4, 1),
    "noise_multiplier": (0.1, 100),
    "group_size": (1, 300),
    "max_shared_groups": (1, 30),
    "before": (1e-4, 20),
    "bands": (1, 30),
}


def drawn(rng):
    """A command with settings from all ranges, and now and then from beyond."""

    def value(name):
        if rng.random() < 0.12:
            return rng.choice(ODD[name])
        found = math.exp(rng.uniform(*map(math.log, USUAL[name])))
        return int(found) if isinstance(ODD[name][0], int) else found

    algorithm = rng.choice(["els", "uls"])
    fields = {"algorithm": algorithm}
    for name, share in (("group_size", 0.6), ("max_shared_groups", 0.1), ("bands", 0.2)):
        if rng.random() < share:
            fields[name] = value(name)
    if "bands" in fields or rng.random() < 0.2:
        fields["sampling"] = rng.choice(["cyclic", "allocation", "poisson", None])
        fields["noise"] = rng.choice(["correlated", "independent"])
    names = ["num_steps", "sampling_prob", "noise_multiplier"]
    command = rng.choice([TO_ACCOUNT, TO_ACCOUNT, TO_CALIBRATE])
    if command is TO_ACCOUNT:
        fields |= {name: value(name) for name in (*names, rng.choice(["delta", "epsilon"]))}
        if rng.random() < 0.2:
            fields["before"] = value("before")
    else:
        names.remove(rng.choice(["num_steps", "noise_multiplier"]))
        fields |= {name: value(name) for name in (*names, "epsilon", "delta")}
    if fields.get("sampling") == "allocation" and rng.random() < 0.9:
        window, count = rng.randint(1, 200), rng.randint(1, 50)
        fields |= {"algorithm": "uls", "num_steps": window * count, "sampling_prob": 1 / window}
        fields |= {"noise": "independent"}
        fields = {n: v for n, v in fields.items() if n not in ("bands", "max_shared_groups")}
    return command, fields


def run(command, fields):
    """What it found, or its one line; everything else is a fault."""
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            return solve(Accounted(**fields), command)
        except ConfigError as error:
            assert "\n" not in str(error) and "=" in str(error), error
            return str(error)


def search(seed, count):
    rng, answers = random.Random(seed), 0
    for _ in range(count):
        command, fields = drawn(rng)
        try:
            found = run(command, fields)
        except Exception as error:
            raise AssertionError(f"{command}: {fields}") from error
        if isinstance(found, str):
            continue
        answers += 1
        for name in ("epsilon", "delta", "noise_multiplier", "sampling_prob", "num_steps"):
            assert float(found[name]) >= 0, (name, command, fields, found)
    return answers


def test_a_few_random_settings_end_in_an_answer_or_in_one_line():
    assert search(3, 8) > 3


@pytest.mark.privacy
def test_noise_is_found_beside_a_private_median():
    given = dict(algorithm="els", num_steps=100, sampling_prob=0.01, group_size=8, delta=1e-6)
    alone, beside = (
        run(TO_CALIBRATE, {**given, "epsilon": 4.0, **more})["noise_multiplier"]
        for more in ({}, {"before": 0.4})
    )
    assert alone < beside < 1.1 * alone
    spent = run(TO_ACCOUNT, {**given, "noise_multiplier": beside, "before": 0.4})["epsilon"]
    assert 4 * (1 - 1e-3) < spent <= 4 < spent + 0.4
    with refuses("before=4.0", says="in (0, epsilon)"):
        solve(Accounted(**given, epsilon=4.0, before=4.0), TO_CALIBRATE)


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"group_size": 9_999_999_999}, "group_size=9999999999"),
        ({"max_shared_groups": 10**10, "algorithm": "uls"}, "max_shared_groups=10000000000"),
        ({"delta": 1.5e-15, "num_steps": 10**7, "noise_multiplier": None}, "delta=1.5e-15"),
        ({"epsilon": 3.0, "num_steps": None, "noise_multiplier": 1e-10}, "epsilon=3.0"),
        ({"epsilon": 3.0, "num_steps": None, "noise_multiplier": None}, "noise_multiplier"),
        ({"delta": None, "noise_multiplier": None}, "delta=None"),
    ],
)
def test_what_is_beyond_all_ranges_is_refused_before_a_search(changed, what):
    given = dict(algorithm="els", epsilon=3.0, sampling_prob=0.01, delta=1e-6, num_steps=2)
    given |= changed
    if "noise_multiplier" not in given:
        given["noise_multiplier"] = None
    with refuses(what):
        solve(Accounted(**given), TO_CALIBRATE)
