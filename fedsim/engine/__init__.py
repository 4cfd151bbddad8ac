"""Engines, which compute clipped sums and losses in this process or on Ray workers.

    engine, factory            the contract, the cut into lanes, and the choice of an engine
    task                       the protocol of a model with its data
    worker, programs           a lane's clipped sum, and the compiled and checked programs
    strategy                   the choice of the clipping strategy, and a trial of it
    ray_engine, actors         the engine on Ray, and its workers
    cluster                    a Ray cluster joined, or started and ended
    jobs                       independent jobs on Ray's workers
    preflight                  the least that a machine must have, checked before JAX starts
    environment                resources, threads, packages and compiled programs of processes
    compiler_options           the options of XLA and JAX that a process may have

Only this package imports Ray.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
