"""A model of one's own: which package was this docstring written for?

    python examples/own_model.py [els|uls] [--num-steps T]

The data are paragraphs of docstrings. A user is a module file, and the model is a small network on
the words of a paragraph. fedsim needs three things of a model, which `PackageTask` has: the first
parameters (`init`), how rows are read (`read`), and the loss of each row (`losses`). Beside it,
fedsim has to know whose each row is. The rest is `fedsim.train`.
"""

import argparse
import re
import tempfile
import zlib

import jax
import numpy as np
import optax
from flax import linen as nn

import fedsim
from fedsim.data import UserStore

PACKAGES = ("python", "numpy", "scipy", "jax")
NUM_WORDS = 256  # words are hashed to so many numbers


class Network(nn.Module):
    """Words [rows, NUM_WORDS] to logits [rows, packages]."""

    @nn.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        # No batch normalisation: the loss of a row may depend on this row alone.
        return nn.Dense(len(PACKAGES))(nn.relu(nn.Dense(16)(words)))


class PackageTask(fedsim.Task):
    """A network and the rows that it is trained and evaluated on."""

    def __init__(self, splits: dict[str, dict[str, np.ndarray]]):
        """Args: splits: for train and eval_users, words [rows, NUM_WORDS] and labels [rows]."""
        self.splits = splits

    def init(self, key: jax.Array):
        """Fresh parameters."""
        return Network().init(key, np.zeros((1, NUM_WORDS), np.float32))

    def read(self, split: str, rows: np.ndarray):
        """The rows by their numbers."""
        return {name: column[rows] for name, column in self.splits[split].items()}

    def losses(self, params, batch) -> jax.Array:
        """The cross entropy of each row."""
        logits = Network().apply(params, batch["words"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])

    def accuracy(self, params) -> float:
        """The share of the held-out users' rows that are recognised."""
        held_out = self.splits["eval_users"]
        logits = Network().apply(params, held_out["words"])
        return float(np.mean(np.argmax(logits, axis=1) == held_out["labels"]))


def words_of(text: str) -> np.ndarray:
    """Which hashed words are in a text, as a unit vector, float32 [NUM_WORDS]."""
    words = np.zeros(NUM_WORDS, np.float32)
    for word in re.findall(r"\w+|[^\w\s]", text.lower()):
        words[zlib.crc32(word.encode()) % NUM_WORDS] = 1.0
    return words / max(np.linalg.norm(words), 1.0)


def rows_of(store: UserStore) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The columns of a split, and the owner of each row."""
    tokens, sizes = store.gather(np.arange(store.num_examples), store.max_length)
    # Tokens are bytes. The first of a row is the begin token.
    texts = [bytes(row[1:size].astype(np.uint8)) for row, size in zip(tokens, sizes, strict=True)]
    owners = np.repeat(store.user_ids(), np.diff(store.offsets))
    # A user is a path: numpy/linalg/_linalg.py, or argparse.py for one of Python's own.
    packages = [owner.split("/")[0] for owner in owners]
    labels = [PACKAGES.index(name) if name in PACKAGES else 0 for name in packages]
    words = np.stack([words_of(text.decode(errors="ignore")) for text in texts])
    return {"words": words, "labels": np.array(labels, np.int32)}, owners


def main() -> None:
    """Trains, and prints what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", nargs="?", default="uls", choices=("els", "uls"))
    parser.add_argument("--num-steps", type=int, default=150)
    given = parser.parse_args()

    pydocs = fedsim.data.load("pydocs")
    train, train_owners = rows_of(pydocs.train)
    held_out, held_out_owners = rows_of(pydocs.eval_users)
    task = PackageTask({"train": train, "eval_users": held_out})
    with tempfile.TemporaryDirectory() as folder:
        run = fedsim.train(
            given.algorithm,
            task=task,
            data={"train": train_owners, "eval_users": held_out_owners},
            epsilon=4,
            num_steps=given.num_steps,
            batch_size=512,
            group_size=4,
            optimizer="adam",
            learning_rate=0.02,
            clip_norm=0.5,
            engine="local",
            run_dir=f"{folder}/run",
        )
        commonest = np.bincount(held_out["labels"]).max() / len(held_out["labels"])
        print(f"users {len(set(train_owners))}, rows {len(train_owners)}")
        print(f"epsilon {run.epsilon:.3f} at delta {run.delta:.2e}, {given.algorithm.upper()}")
        print(f"loss {run.summary['initial_eval_loss']:.3f} -> {run.eval_loss:.3f}")
        print(f"accuracy {task.accuracy(run.params):.3f} (always the commonest: {commonest:.3f})")


if __name__ == "__main__":
    main()
