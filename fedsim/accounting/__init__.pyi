from . import (
    accountant as accountant,
    calibration as calibration,
    composition as composition,
    mixture as mixture,
)
from .accountant import (
    RELATIVE_ACCURACY as RELATIVE_ACCURACY,
    RunningEpsilon as RunningEpsilon,
    at_least as at_least,
    at_most as at_most,
    composed_loss as composed_loss,
    delta as delta,
    epsilon as epsilon,
    epsilon_with as epsilon_with,
    privacy_curve as privacy_curve,
    spent as spent,
)
from .calibration import (
    calibrate_noise as calibrate_noise,
    noise_multiplier as noise_multiplier,
)
from .composition import Errors as Errors, Slack as Slack, slack as slack, together as together
from .events import (
    MAX_CONTRIBUTIONS as MAX_CONTRIBUTIONS,
    MAX_NOISE as MAX_NOISE,
    MAX_STEPS as MAX_STEPS,
    Event as Event,
    Events as Events,
    PureEvent as PureEvent,
    StepEvent as StepEvent,
    allocated_event as allocated_event,
    cyclic_event as cyclic_event,
    event_fields as event_fields,
    of_words as of_words,
    to_words as to_words,
)
from .gaussian_dp import (
    gaussian_delta as gaussian_delta,
    gaussian_epsilon as gaussian_epsilon,
    gaussian_mu as gaussian_mu,
)
from .people import (
    for_people as for_people,
    group_epsilon as group_epsilon,
    log_group_growth as log_group_growth,
)
from .selection import SelectionEvent as SelectionEvent, draw_trials as draw_trials
