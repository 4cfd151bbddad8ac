"""FedJAX on the workloads of `shape`, in its own environment. Last line: one JSON object.

PYTHON fedjax_rounds.py overhead|lm ROUNDS
"""

import json
import sys
import time

import fedjax
import jax
import jax.numpy as jnp
import numpy as np
import shape

BATCH = 16  # sentences of a step: clients of many sizes share one compiled shape


def overhead(rounds):
    """Clients that do nothing: their parameters are the answer, which the server adds."""
    rows = []
    for name, floats in shape.MODEL_FLOATS.items():
        params = jnp.zeros(floats)
        cohort = 512 if floats < 10_000_000 else 64
        run = fedjax.for_each_client(
            lambda shared, _: shared, lambda state, batch: state, lambda shared, state: state
        )
        clients = [(b"%d" % i, [{"x": jnp.zeros(1)}], jnp.zeros(1)) for i in range(cohort)]
        seconds = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            total = jnp.zeros_like(params)
            for _, answer in run(params, clients):
                total = total + answer
            total.block_until_ready()
            seconds.append(time.perf_counter() - started)
        rows.append({"model": name, "cohort": cohort, "seconds": seconds})
    return rows


def lm(rounds):
    tokens, offsets = shape.sentences()
    grad_fn = jax.grad(lambda params, x, mask: (shape.losses(params, x) * mask).sum())

    def init(shared, _):
        return {"params": shared, "grad": jax.tree_util.tree_map(jnp.zeros_like, shared)}

    def step(state, batch):
        grad = grad_fn(state["params"], batch["x"], batch["m"])
        return {**state, "grad": jax.tree_util.tree_map(jnp.add, state["grad"], grad)}

    def final(shared, state):
        norm = jnp.sqrt(sum((g * g).sum() for g in jax.tree_util.tree_leaves(state["grad"])))
        scale = jnp.minimum(1.0, shape.CLIP / norm)
        return jax.tree_util.tree_map(lambda g: g * scale, state["grad"])

    run = fedjax.for_each_client(init, step, final)
    params = jax.tree_util.tree_map(jnp.asarray, shape.initial())
    seconds = []
    for cohort in shape.cohorts(rounds + 1):
        started = time.perf_counter()
        clients = []
        for user in cohort:
            mine = tokens[offsets[user] : offsets[user + 1]]
            x = np.zeros((-len(mine) // BATCH * -BATCH, shape.LENGTH + 1), np.int32)
            x[: len(mine)] = mine
            mask = (np.arange(len(x)) < len(mine)).astype(np.float32) / np.float32(len(mine))
            batches = [
                {"x": x[i : i + BATCH], "m": mask[i : i + BATCH]} for i in range(0, len(x), BATCH)
            ]
            clients.append((b"%d" % user, batches, jnp.zeros(1)))
        total = jax.tree_util.tree_map(jnp.zeros_like, params)
        for _, grad in run(params, clients):
            total = jax.tree_util.tree_map(jnp.add, total, grad)
        rate = shape.LEARNING_RATE / shape.COHORT
        params = jax.tree_util.tree_map(lambda p, g, rate=rate: p - rate * g, params, total)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - started)
    return [{"seconds": seconds, "norm": float(jnp.linalg.norm(params["embed"]))}]


if __name__ == "__main__":
    print(json.dumps({"overhead": overhead, "lm": lm}[sys.argv[1]](int(sys.argv[2]))))
