"""Flower on the workloads of `shape`, in its own environment. Last line: one JSON object.

PYTHON flower_rounds.py overhead NODES FLOATS ROUNDS     clients that return what they got
PYTHON flower_rounds.py fault NODES 0 ROUNDS             one client's process exits in round 2
"""

import json
import logging
import os
import sys
import time

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"

import numpy as np
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation

WHAT, (NODES, FLOATS, ROUNDS) = sys.argv[1], map(int, sys.argv[2:5])
COHORT = min(NODES, 50)
SEEN = {"starts": [], "ends": [], "answers": [], "failures": []}


class Client(NumPyClient):
    def fit(self, parameters, config):
        if config["poison"] and np.random.default_rng().integers(4) == 0:
            os._exit(1)
        return parameters, 1, {}


class Strategy(FedAvg):
    def configure_fit(self, server_round, parameters, client_manager):
        SEEN["starts"].append(time.perf_counter())
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round, results, failures):
        found = super().aggregate_fit(server_round, results, failures)
        SEEN["ends"].append(time.perf_counter())
        SEEN["answers"].append(len(results))
        SEEN["failures"].append(len(failures))
        return found


def server(context):
    strategy = Strategy(
        fraction_fit=COHORT / NODES,
        fraction_evaluate=0.0,
        min_fit_clients=COHORT,
        min_available_clients=NODES,
        initial_parameters=ndarrays_to_parameters([np.zeros(max(FLOATS, 10), np.float32)]),
        on_fit_config_fn=lambda number: {"poison": int(WHAT == "fault" and number == 2)},
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=ROUNDS))


if __name__ == "__main__":
    logging.disable(logging.INFO)
    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=lambda context: Client().to_client()),
        num_supernodes=NODES,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}},
    )
    seconds = [end - start for start, end in zip(SEEN["starts"], SEEN["ends"], strict=False)]
    print(json.dumps({**SEEN, "cohort": COHORT, "seconds": seconds}))
