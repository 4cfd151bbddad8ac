"""The first call of a process that computes: it may end before JAX is imported."""

from fedsim.config import EngineConfig
from fedsim.engine.machine import expect_enough


def set_threads(config: EngineConfig) -> bool:
    """Check the machine, then call `environment.set_threads`, which starts JAX.

    Returns: true if the process has the threads and devices of the settings.
    Raises: ConfigError: the machine is too small, or JAX cannot compute with its settings.
    """
    expect_enough(config)
    from fedsim.engine import environment

    return environment.set_threads(config)
