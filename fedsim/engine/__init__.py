"""Engines, which compute clipped sums and losses in this process or on Ray workers.

    engine, factory            the contract, the cut into lanes, the choice of engine and strategy
    task                       the protocol of a model with its data
    worker, programs           a lane's clipped sum, and the compiled and checked programs
    ray_engine                 the engine on Ray
    cluster                    a Ray cluster joined, or started and ended
    preflight                  the least that a machine must have, and the workers it has room for
    environment                threads, options of XLA and JAX, packages, compiled programs

Only this package imports Ray.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
