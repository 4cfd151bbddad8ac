from . import ray_engine as ray_engine
from .engine import (
    At as At,
    Engine as Engine,
    EngineError as EngineError,
    Stats as Stats,
    ignore as ignore,
)
from .environment import (
    expect_usable_jax as expect_usable_jax,
    keep_compiled as keep_compiled,
    version as version,
    versions as versions,
)
from .factory import choose_strategy as choose_strategy, create as create
from .preflight import (
    exhausted as exhausted,
    keep_memory as keep_memory,
    set_threads as set_threads,
)
from .task import (
    DUMMY as DUMMY,
    Batch as Batch,
    Params as Params,
    Task as Task,
    WrappedTask as WrappedTask,
)
from .worker import Worker as Worker
