from . import independent as independent
from .correlated import (
    Correlated as Correlated,
    Prediction as Prediction,
    Strategy as Strategy,
    best as best,
    predicted_error as predicted_error,
    predictions as predictions,
    strategy as strategy,
)
from .independent import (
    CELL_ERRORS as CELL_ERRORS,
    CELLS_BITS as CELLS_BITS,
    AddNoise as AddNoise,
    add_gaussian as add_gaussian,
    gaussian as gaussian,
    in_blocks as in_blocks,
    noisy_mean_loss as noisy_mean_loss,
    noisy_number as noisy_number,
    release_shift as release_shift,
)
