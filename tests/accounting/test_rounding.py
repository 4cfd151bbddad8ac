"""A bound that is shown is never less than the one that holds."""

import numpy as np
import pytest

from fedsim.accounting.accountant import at_least, at_most


@pytest.mark.parametrize(
    "form, unit", [(".2e", 0.01), (".4f", 1e-4), (".1%", 1e-3), (",.2f", 0.01)]
)
def test_what_is_shown_is_the_next_number_above(form, unit):
    rng = np.random.default_rng(0)
    for value in [*10 ** rng.uniform(-9, 2, 200), 1e-6, 4.0, 0.1, 0.123]:
        shown = float(at_most(value, form).strip("%").replace(",", ""))
        shown = shown / 100 if form.endswith("%") else shown
        step = unit * 10 ** np.floor(np.log10(value)) if form.endswith("e") else unit
        assert value * (1 - 1e-15) <= shown < value + step * (1 + 1e-9)


def test_probabilities_are_rounded_down():
    rng = np.random.default_rng(0)
    for value in [*10 ** rng.uniform(-9, 0, 200), 0.25, 1.0]:
        shown = float(at_least(value, ".3g"))
        assert value * (1 - 1e-2) < shown <= value * (1 + 1e-15)
    assert at_least(0.25599, ".3g") == "0.255" and at_least(0.25, ".3g") == "0.25"
    assert at_most(2.3401e-6, ".2e") == "2.35e-6" and at_most(4.0, ".4f") == "4.0000"
    assert at_most(float("inf"), ".6g") == "inf"
