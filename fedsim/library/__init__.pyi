from .run import Run as Run, load as load
from .training import TrainSettings as TrainSettings, train as train
