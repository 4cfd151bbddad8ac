"""The accountant: user-level (epsilon, delta) of DP-SGD-ELS and DP-SGD-ULS, and calibration.

    epsilon, delta, privacy_curve    cost of released steps (Theorems 1 and 2)
    RunningEpsilon                   epsilon during training
    noise_multiplier, num_steps      the best value of one, given the other
    calibrate_noise                  the noise for the steps of an algorithm
    for_people, group_epsilon        the same for several users together
    StepEvent, PureEvent             descriptions of what was released
    gaussian_mu                      cost as one number that adds up, even over adaptive steps
    to_words, of_words               events as JSON

`events` describe releases, `accountant` computes their cost, `calibration` searches with it for
noise or steps. `mixture` has the privacy loss of one step, `allocation` that of steps
of which each user is in one, `selection` that of a private selection, `composition` that of many;
`people` has that for several users together, `noise_slack` the cost of noise that is not ideal.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
