"""DP-SGD-ULS (Charles et al. 2024, Algorithm 2) line by line. On the right: the paper's symbols.

python examples/uls_by_hand.py [STEPS] trains a tiny language model on docstrings. What it leaves to
fedsim.train: a ledger of what was released, checkpoints, and workers. Who knows the key knows the
noise, so no seed is used here.
"""

import sys

import jax
import optax

from fedsim import Clip, SecretKey, accounting
from fedsim.data import load
from fedsim.engine.worker import LocalEngine
from fedsim.evaluate import evaluate, headline
from fedsim.mechanism import noisy_mean
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import preset
from fedsim.sampling import Poisson, draw_groups

data, key = load("pydocs"), SecretKey.create()
users, clip = data.train, Clip(norm=1.0)  # ........................................ D_u, C
num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20  # ....................... T
group_size, cohort_size = 2, 32  # ................................................. G_ULS, M
task = LanguageModelTask(data, preset("tiny", users.vocab_size, users.max_length))  # f
engine = LocalEngine(task, num_lanes=1)
params, optimizer = task.init(jax.random.key(0)), optax.adam(0.01)  # .............. theta^0, update
state, first_params = optimizer.init(params), params
sampler = Poisson(users.num_users, cohort_size)  # ................................. q = M / N
target = {"epsilon": 8.0, "delta": 1e-6}
sigma = accounting.calibrate_noise(sampler.event, num_steps=num_steps, **target)  # sigma
for t in range(num_steps):
    cohort = sampler.draw(key, t)  # ............................................... U^t
    groups = draw_groups(users.offsets, cohort, group_size, key, t)  # ............. D_u^t
    grad_sum, _ = engine.clipped_sum(params, groups, clip)  # sum_u clip(mean_z grad f(theta^t, z))
    noise = {"clip": clip, "noise_multiplier": sigma, "key": key, "step": t}  # C sigma
    grad = noisy_mean(grad_sum, count=cohort_size, **noise).values()  # ............ g^t
    updates, state = optimizer.update(grad, state, params)
    params = optax.apply_updates(params, updates)  # theta^t+1 = update(theta^t, g^t)
epsilon = accounting.epsilon([(sampler.event(sigma), num_steps)], target["delta"])  # Theorem 2
before, after = (headline(evaluate(engine, p, data, 128)) for p in (first_params, params))
print(f"eval loss {before:.3f} -> {after:.3f}, epsilon {epsilon:.3f} at delta {target['delta']}")
