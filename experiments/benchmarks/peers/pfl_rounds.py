"""pfl on the workloads of `shape`, in its own environment. Rank 0's last line: one JSON object.

PYTHON pfl_rounds.py overhead|lm ROUNDS     or by torchrun, for several processes
"""

import hashlib
import itertools
import json
import sys
import time

import numpy as np
import shape
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops.selector import get_default_framework_module as ops
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch.nn import functional


class NoOp(torch.nn.Module):
    """Parameters that training leaves alone."""

    def __init__(self, floats):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(floats))

    def loss(self, x, eval=False):
        return self.weight[0] * 0.0

    def metrics(self, x, eval=False):
        return {}


class LanguageModel(torch.nn.Module):
    """`shape.losses` in torch."""

    def __init__(self):
        super().__init__()
        start = {name: torch.tensor(value) for name, value in shape.initial().items()}
        self.w = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in start.items()})

    def loss(self, tokens, eval=False):
        tokens = tokens.long()
        x = self.w["embed"][tokens[:, :-1]] + self.w["positions"]
        for layer in range(shape.LAYERS):
            y = functional.layer_norm(x, (shape.WIDTH,)) @ self.w[f"qkv{layer}"]
            q, k, v = (
                z.reshape(*z.shape[:2], shape.HEADS, -1).transpose(1, 2) for z in y.chunk(3, dim=-1)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(x.shape) @ self.w[f"out{layer}"]
            y = functional.layer_norm(x, (shape.WIDTH,)) @ self.w[f"up{layer}"]
            x = x + functional.gelu(y, approximate="tanh") @ self.w[f"down{layer}"]
        logits = functional.layer_norm(x, (shape.WIDTH,)) @ self.w["embed"].T
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def metrics(self, tokens, eval=False):
        return {}


def run(module, dataset, cohort, rounds, batch, private):
    """Seconds of each round, the first of which warms up."""
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), shape.LEARNING_RATE),
    )
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(shape.CLIP, shape.NOISE))
    backend = SimulatedBackend(dataset, dataset, postprocessors=[noise] if private else [])
    algorithm = FederatedAveraging()
    algorithm_params = NNAlgorithmParams(rounds + 1, 10**9, cohort, 0)
    training = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=1.0, local_batch_size=batch
    )
    seconds = []
    for number in range(rounds + 1):
        started = time.perf_counter()
        contexts, model, _ = algorithm.get_next_central_contexts(
            model, number, algorithm_params, training, NNEvalHyperParams(batch)
        )
        context = contexts[0]  # of training; the first round has one for evaluation, too
        statistics, metrics = backend.gather_results(
            model=model, training_algorithm=algorithm, central_context=context
        )
        model, _ = algorithm.process_aggregated_statistics(context, metrics, model, statistics)
        seconds.append(time.perf_counter() - started)
    return seconds


def overhead(rounds):
    rows = []
    for name, floats in shape.MODEL_FLOATS.items():
        cohort = 512 if floats < 10_000_000 else 64
        nothing, users = Dataset([torch.zeros(1, 1)]), itertools.count()
        dataset = FederatedDataset(lambda user, nothing=nothing: nothing, users.__next__)
        seconds = run(NoOp(floats), dataset, cohort, rounds, 1, private=False)
        rows.append({"model": name, "cohort": cohort, "seconds": seconds})
    return rows


def lm(rounds):
    tokens, offsets = shape.sentences()
    users = iter(shape.cohorts(rounds + 1).ravel().tolist())

    def user_data(user):
        return Dataset([torch.tensor(tokens[offsets[user] : offsets[user + 1]])])

    module = LanguageModel()
    dataset = FederatedDataset(user_data, lambda: next(users))
    np.random.seed(0)
    torch.manual_seed(0)
    seconds = run(module, dataset, shape.COHORT, rounds, shape.MAX_SENTENCES, private=True)
    digest = hashlib.sha256(
        b"".join(value.detach().numpy().tobytes() for value in module.w.values())
    )
    return [{"seconds": seconds, "sha256": digest.hexdigest()}]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {"overhead": overhead, "lm": lm}[sys.argv[1]](int(sys.argv[2]))
    if ops().distributed.global_rank == 0:
        print(json.dumps(found))
