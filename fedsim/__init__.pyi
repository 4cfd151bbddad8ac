from . import accounting as accounting, clipping as clipping, data as data
from .accounting import PureEvent as PureEvent, StepEvent as StepEvent
from .clipping import Clip as Clip
from .els import ELS as ELS
from .engine import EngineError as EngineError, Task as Task
from .errors import ConfigError as ConfigError, DataError as DataError, FedsimError as FedsimError
from .keys import SecretKey as SecretKey
from .library import (
    Run as Run,
    TrainSettings as TrainSettings,
    audit as audit,
    dry_run as dry_run,
    load as load,
    recommend as recommend,
    train as train,
)
from .training import Callback as Callback
from .uls import ULS as ULS

__version__: str
