"""Events in JSON's words: what is written is what is read, whatever kinds of events there are."""

import json

import pytest

from fedsim.accounting import PureEvent, StepEvent, of_words, to_words

PHASES = [(StepEvent(1.25, 0.1, 4), 30), (PureEvent(0.5), 1)]


def test_what_is_written_is_what_is_read():
    assert of_words(json.loads(json.dumps(to_words(PHASES)))) == PHASES


@pytest.mark.parametrize(
    "words",
    [
        [[{"kind": "Nothing"}, 1]],
        [[{"noise_multiplier": 1.0}, 1]],
        [[{"kind": "PureEvent", "epsilon": -1.0}, 1]],
        [[{"kind": "PureEvent", "epsilon": 1.0}, -1]],
        [[{"kind": "PureEvent", "epsilon": 1.0}, True]],
        3,
    ],
)
def test_anything_else_is_refused(words):
    with pytest.raises((KeyError, TypeError, ValueError)):
        of_words(words)
