"""A bound that is shown is never less than the one that holds."""

import numpy as np
import pytest

from fedsim.accounting.rounding import at_most


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


def test_what_needs_no_rounding_is_shown_as_it_is():
    assert [at_most(4.0, ".4f"), at_most(1e-6, ".2e"), at_most(0.5, ".1%")] == [
        *("4.0000", "1.00e-6", "50.0%")
    ]
    assert at_most(2.3401e-6, ".2e") == "2.35e-6"
