"""The accountant: user-level (epsilon, delta) of DP-SGD-ELS and DP-SGD-ULS, and calibration.

    epsilon, delta, privacy_curve    what some released steps cost (Theorems 1 and 2)
    noise_multiplier, sampling_prob, num_steps    the best value of one, given the others
    calibrate_noise    the noise that an algorithm's steps take
    StepEvent, PureEvent    what was released; RunningEpsilon: epsilon while training
    gaussian_mu    what it costs as one number that adds up however steps are chosen (`gaussian_dp`)
    to_words, of_words    events in JSON's words

`events` are what was released, `accountant` answers, `unknowns` searches with it for noise,
probability or steps. `mixture` has the privacy loss of one step, `allocation` that of steps of
which each user is in one, `composition` that of many, `pure_dp` the loss of pure DP,
`noise_slack` what noise that is not ideal adds.
"""

from fedsim.accounting.accountant import (
    RELATIVE_ACCURACY,
    RunningEpsilon,
    composed_loss,
    delta,
    epsilon,
    epsilon_with,
    privacy_curve,
)
from fedsim.accounting.events import (
    MOST_CONTRIBUTIONS,
    MOST_NOISE,
    MOST_STEPS,
    Event,
    Phases,
    StepEvent,
    allocated_event,
    cyclic_event,
    event_fields,
    event_of,
    of_words,
    to_words,
)
from fedsim.accounting.gaussian_dp import gaussian_delta, gaussian_epsilon, gaussian_mu, zcdp_delta
from fedsim.accounting.noise_slack import Slack, slack, together
from fedsim.accounting.pure_dp import PureEvent
from fedsim.accounting.selection import SelectionEvent
from fedsim.accounting.unknowns import calibrate_noise, noise_multiplier, num_steps, sampling_prob

__all__ = [
    "MOST_CONTRIBUTIONS",
    "MOST_NOISE",
    "MOST_STEPS",
    "RELATIVE_ACCURACY",
    "Event",
    "Phases",
    "PureEvent",
    "RunningEpsilon",
    "SelectionEvent",
    "Slack",
    "StepEvent",
    "allocated_event",
    "calibrate_noise",
    "composed_loss",
    "cyclic_event",
    "delta",
    "epsilon",
    "epsilon_with",
    "event_fields",
    "event_of",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "noise_multiplier",
    "num_steps",
    "of_words",
    "privacy_curve",
    "sampling_prob",
    "slack",
    "to_words",
    "together",
    "zcdp_delta",
]
