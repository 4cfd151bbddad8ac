"""Users' own steps (DP-FedAvg): against plain loops, and what they become in the limit."""

import jax
import numpy as np
import pytest
import reference
from problems import SoftmaxTask
from test_train import command, summary, texts  # noqa: F401

from fedsim.cli.main import main
from fedsim.clipping import Clip, LocalSteps, Strategy, clip_chunk
from fedsim.clipping.layers import UnsupportedModel

CLIP = Clip(0.3, normalised=True, in_float32=True)  # to compare all digits


def problem(rng, units=5, group=7):
    mask = np.arange(group) < rng.integers(0, group + 1, units)[:, None]
    mask[0], mask[1] = True, False
    x = rng.uniform(-1, 1, (units, group, 4)).astype(np.float32)
    theta = rng.uniform(-0.5, 0.5, (4, 3)).astype(np.float32)
    return theta, {"x": x, "y": rng.integers(3, size=(units, group))}, mask


def computed(theta, batch, mask, local, rows_per_pass=2, strategy="scan"):
    losses = SoftmaxTask(np.zeros(0), np.zeros(0), 3).losses

    def run(theta, batch, mask):
        own = Strategy(strategy, rows_per_pass)
        return clip_chunk(losses, theta, batch, mask, CLIP, own, local=local)

    return jax.jit(run)(theta, batch, mask)


def by_hand(theta, batch, mask, local):
    """The same as NumPy loops over users, steps and rows."""
    total = np.zeros_like(theta, np.float64)
    for x, y, real in zip(batch["x"], batch["y"], mask, strict=True):
        gradient_of = reference.softmax_gradient(x.astype(np.float64), y)
        at, update = theta.astype(np.float64), np.zeros_like(theta, np.float64)
        for part in np.array_split(np.arange(len(real)), local.number):
            rows = [row for row in part if real[row]]
            if rows:
                gradient = sum(gradient_of(at, row) for row in rows) / len(rows)
                update += gradient * len(rows) / real.sum()
                at = at - local.learning_rate * gradient
        if real.any():
            total += reference.clip(update, CLIP.norm, CLIP.normalised)
    return total


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("rows_per_pass", [1, 4])
def test_it_equals_plain_loops(number, rows_per_pass, rng):
    theta, batch, mask = problem(rng)
    local = LocalSteps(number, 0.8)
    total, norms, _, dropped = computed(theta, batch, mask, local, rows_per_pass)
    expected = by_hand(theta, batch, mask, local)
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
    assert norms[1] == 0 and not dropped.any()  # a user without rows
    gradient = computed(theta, batch, mask, None)[0]
    alike = np.allclose(total, gradient, rtol=1e-5, atol=1e-6)
    assert alike == (number == 1)


def test_every_number_of_steps_is_another_update(rng):
    theta, batch, mask = problem(rng, group=8)
    found = [computed(theta, batch, mask, LocalSteps(n, 0.8))[0] for n in range(1, 9)]
    assert len({np.asarray(total).tobytes() for total in found}) == 8


def test_short_steps_end_at_the_gradient(rng):
    theta, batch, mask = problem(rng)
    total = computed(theta, batch, mask, LocalSteps(3, 1e-9))[0]
    np.testing.assert_allclose(total, computed(theta, batch, mask, None)[0], rtol=1e-5, atol=1e-6)


def test_a_user_whose_steps_diverge_contributes_nothing(rng):
    theta, batch, mask = problem(rng)
    others = computed(theta, batch, mask & (np.arange(5) > 0)[:, None], LocalSteps(2, 0.8))[0]
    batch["x"][0] = np.inf
    total, _, _, dropped = computed(theta, batch, mask, LocalSteps(2, 0.8))
    assert dropped.tolist() == [True] + 4 * [False]
    np.testing.assert_array_equal(total, others)


def test_direct_takes_them_too(rng):
    given, local = problem(rng), LocalSteps(3, 0.8)
    expected, found = (computed(*given, local, strategy=name)[0] for name in ("scan", "direct"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_ghost_refuses(rng):
    with pytest.raises(UnsupportedModel, match="own steps"):
        computed(*problem(rng), LocalSteps(2, 0.1), strategy="ghost")


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_takes_local_steps(texts, run_dir):  # noqa: F811
    flags = {"num-steps": 2, "group-size": 4, "local-learning-rate": 1.0}
    found = set()
    for number in (1, 2):
        own = run_dir / str(number)
        main(command(texts, own, **flags, **{"local-steps": number}))
        found.add(summary(own)["params_sha256"])
    assert len(found) == 2


@pytest.mark.parametrize("algorithm, steps", [("els", 2), ("uls", 3), ("uls", 0)])
def test_steps_that_cannot_be_are_refused(algorithm, steps, texts, run_dir, capsys):  # noqa: F811
    with pytest.raises(SystemExit) as stopped:
        main(command(texts, run_dir, algorithm, **{"local-steps": steps}))
    assert stopped.value.code == 2 and not run_dir.exists()
    assert f"local_steps={steps}: expected" in capsys.readouterr().err.splitlines()[-1]
