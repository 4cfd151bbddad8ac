"""Small problems that several test files share."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.mean_task import MeanTask
from fedsim.engine.task import Task


class SoftmaxTask(Task):
    """Softmax regression on points in memory; its gradient has a closed form (reference.py)."""

    def __init__(self, features, labels, num_classes):
        self.features = np.asarray(features, np.float32)
        self.labels = np.asarray(labels)
        self.num_classes = num_classes

    def read(self, split, rows):
        return {"x": self.features[rows], "y": self.labels[rows]}

    def losses(self, params, batch):
        log_probs = jax.nn.log_softmax(batch["x"] @ params)
        return -jnp.take_along_axis(log_probs, batch["y"][:, None], axis=1)[:, 0]

    def nats(self, params, batch):
        return self.losses(params, batch), jnp.ones(len(batch["y"]), jnp.int32)


def users_of_sizes(sizes):
    """Users with so many examples each, as the samplers see them."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return SimpleNamespace(offsets=offsets, num_users=len(sizes), num_examples=int(offsets[-1]))


def softmax_problem(rng, sizes, width=5, num_classes=4):
    """(users, task, theta float64) with random data."""
    users = users_of_sizes(sizes)
    features = rng.normal(size=(users.num_examples, width)).astype(np.float32)
    labels = rng.integers(num_classes, size=users.num_examples)
    theta = rng.normal(size=(width, num_classes)).astype(np.float32)
    return users, SoftmaxTask(features, labels, num_classes), theta


def mean_problem(rng, sizes, width=6):
    """(users, task) of mean estimation."""
    users = users_of_sizes(sizes)
    return users, MeanTask(rng.normal(size=(users.num_examples, width)))
