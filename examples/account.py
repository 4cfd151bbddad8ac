"""What DP-SGD costs, and what a privacy budget buys, without any training.

    python examples/account.py

Everything here is the user-level guarantee of Charles et al. 2024 (Theorems 1 and 2): add or remove
one user, with Poisson sampling. Every number is an upper bound.
"""

from fedsim import PureEvent, StepEvent, accounting

DELTA = 1e-6
NUM_STEPS = 1000  # T
NUM_USERS, GROUP_SIZE = 100_000, 16  # N and G, which is also how many examples each of them has

# ---- One run: epsilon, delta, and the whole trade-off ------------------------------------------
# A step of ULS. A user is clipped as a whole, so it adds at most once, whatever its group size.
step = StepEvent(noise_multiplier=1.0, sampling_prob=0.01)  # sigma, q
print("ULS, 1000 steps, sigma 1, q 0.01")
print(f"  epsilon {accounting.epsilon([(step, NUM_STEPS)], DELTA):.3f} at delta {DELTA:g}")
print(f"  delta   {accounting.delta([(step, NUM_STEPS)], epsilon=2.0):.2e} at epsilon 2")

epsilons = [0.5, 1.0, 2.0, 3.0, 4.0]
deltas = accounting.privacy_curve([(step, NUM_STEPS)], epsilons)
print("  epsilon", *(f"{value:>9g}" for value in epsilons))
print("  delta  ", *(f"{value:9.1e}" for value in deltas))

# What was released before training is added to the list: here a group size that was chosen
# privately for epsilon 0.2.
phases = [(PureEvent(0.2), 1), (step, NUM_STEPS)]
print(f"  epsilon {accounting.epsilon(phases, DELTA):.3f} with a private group size before it\n")

# ---- Calibration: noise for steps, and steps for noise -----------------------------------------
target = {"epsilon": 2.0, "delta": DELTA}
sigma = accounting.noise_multiplier(sampling_prob=0.01, num_steps=NUM_STEPS, **target)
spent = [accounting.epsilon([(step, 100 * n)], DELTA) for n in range(1, 30)]
steps = 100 * sum(epsilon <= target["epsilon"] for epsilon in spent)
print(f"For epsilon 2 at delta {DELTA:g}")
print(f"  the least noise:          sigma {sigma:.4f} (q 0.01, 1000 steps)")
print(f"  the most hundreds of steps: {steps // 100} (sigma 1, q 0.01)\n")

# ---- ELS against ULS, at the same number of gradients ------------------------------------------
# ELS draws examples. A user with G of them in the pool can be in a step G times: Theorem 1. ULS
# draws users, G examples of each, so a step has fewer users: M = B / G.
# The noise on the mean gradient is C sigma / B (ELS) or C sigma / M (ULS). The clip norms C differ:
# the mean over G examples is shorter than each of them, down to 1/sqrt(G) if they have little in
# common. So this is the best case of ULS; `fedsim recommend` measures the real one.
pool = NUM_USERS * GROUP_SIZE  # |D_sub|
print(f"Noise per step of {NUM_USERS:,} users with {GROUP_SIZE} examples each, for epsilon 2")
print(f"{'gradients':>9} {'sigma ELS':>10} {'sigma ULS':>10} {'noise ELS':>10} {'noise ULS':>10}")
for budget in (1024, 8192, 65536):
    cohort = budget // GROUP_SIZE  # M
    els = accounting.noise_multiplier(
        sampling_prob=budget / pool, max_contributions=GROUP_SIZE, num_steps=NUM_STEPS, **target
    )
    uls = accounting.noise_multiplier(
        sampling_prob=cohort / NUM_USERS, num_steps=NUM_STEPS, **target
    )
    els_noise, uls_noise = els / budget, uls / cohort / GROUP_SIZE**0.5
    winner = "ELS" if els_noise < uls_noise else "ULS"
    print(f"{budget:9} {els:10.4f} {uls:10.4f} {els_noise:10.6f} {uls_noise:10.6f}  {winner}")
