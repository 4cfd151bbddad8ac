"""Errors: one line for people, and what it is about for programs."""

import pickle

import pytest
from refused import refuses

from fedsim.errors import ConfigError, DataError, MissingColumn, expect, expect_count


@pytest.mark.parametrize("kind", [ConfigError, DataError, MissingColumn])
def test_an_error_has_what_its_line_says_in_other_processes_too(kind):
    error = kind.of("delta", 2.0, "in (0, 1)")
    for each in (error, pickle.loads(pickle.dumps(error))):  # as Ray sends it
        assert type(each) is kind and str(each) == "delta=2.0: expected in (0, 1)"
        assert (each.field, each.value, each.expected) == ("delta", 2.0, "in (0, 1)")
        assert each.exit_code == 2


def test_what_holds_is_not_refused():
    expect("delta", 0.5, True, "in (0, 1)")
    expect_count("num_steps", 1, 1)
    for value in (0, 1.0, True, "1"):
        with refuses(f"num_steps={value}"):
            expect_count("num_steps", value, 1)
