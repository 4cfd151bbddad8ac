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

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
