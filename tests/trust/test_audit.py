"""The audit stays below the claim when training keeps it, and above when it does not."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from problems import mean_problem, users_of_sizes
from test_shared_runs import chat, command  # noqa: F401 (a fixture)
from test_verify import write_texts

from fedsim import accounting
from fedsim.cli.main import main
from fedsim.clipping import Clip
from fedsim.els import ELS
from fedsim.engine.worker import LocalEngine
from fedsim.keys import SecretKey
from fedsim.mechanism import noisy_mean
from fedsim.noise import Correlated
from fedsim.sampling import Poisson, Sampling
from fedsim.trust.audit import judge, sentence
from fedsim.trust.bounds import audit_guesses, curve_claim
from fedsim.trust.canaries import POOLS, Canaries, CanaryTask, coins
from fedsim.uls import ULS

CANARIES, OTHERS, STEPS, DELTA = 1500, 60, 4, 1e-5
POISSON = Sampling("poisson")
BANDS = 8
CYCLIC, ALLOCATION = Sampling("cyclic", BANDS), Sampling("allocation", window=BANDS)


def audited(
    epsilon,
    trial,
    *,
    noise=1.0,
    algorithm=ULS,
    sampling=POISSON,
    share=0.9,
    correlated=False,
    steps=STEPS,
    redrawn=False,
):
    """The test by guesses of mean estimation that claims epsilon, with `noise` times its noise.

    Args:
      share: of all units that is expected in a step.
      correlated: whether the noise is, over the bands of the sampling.
      redrawn: the mistake that every unit is drawn in every step with the probability of those of
        the group whose turn it is, or of the step that was allocated.
    """
    rng = np.random.default_rng(trial)
    included = coins(CANARIES, rng)
    group_size, rows = (4, 4) if algorithm is ULS else (2, 2 * POOLS)
    plant = Canaries(included, rows, 1.0)
    sizes = [rows] * (OTHERS + int(included.sum()))
    users = users_of_sizes(sizes)
    _, inner = mean_problem(rng, sizes, width=CANARIES)
    owners = np.full(users.num_examples, -1, np.int32)
    owners[OTHERS * rows :] = np.repeat(np.flatnonzero(included), rows)
    task = CanaryTask(inner, owners, plant.directions, plant.clip_norm)
    options = {"group_size": group_size, "sampling": sampling, "key": SecretKey.create(trial)}
    budget = round(share * users.num_users) * group_size
    method = algorithm(users, batch_size=budget, **options)
    sigma = accounting.calibrate_noise(method.event, epsilon=epsilon, delta=DELTA, num_steps=steps)
    claimed = [(method.event(sigma), steps)]
    if redrawn:
        often = round(method.sampler.num_units * method.event(1.0).sampling_prob)
        method.sampler = Poisson(method.sampler.num_units, often)
    local = LocalEngine(task, num_lanes=1)
    settings = {"clip": Clip(1.0), "noise_multiplier": noise * sigma}
    if correlated:
        settings["add_noise"] = Correlated(steps, sampling.bands)
    for step in range(steps):  # without a training around them, at fixed parameters
        noisy, _ = method.gradient(jnp.zeros(CANARIES), step, local, **settings)
        plant.on_release(noisy.values(), 1 / method.sampler.expected_count)
    epsilons = np.linspace(0, 2 * epsilon + 1, 100)
    claim = curve_claim(epsilons, accounting.privacy_curve(claimed, epsilons))
    return audit_guesses(plant.scores(), included, claim, DELTA, 5e-4)


STORM = pytest.param(20, marks=[pytest.mark.slow, pytest.mark.privacy])


@pytest.mark.parametrize("trials", [1, STORM])
@pytest.mark.parametrize("algorithm", [ULS, ELS])
@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_a_tenth_of_the_noise_is_refuted_and_all_of_it_is_not(algorithm, epsilon, trials):
    for noise, refuted in ((1.0, 0), (0.1, trials)):
        found = [audited(epsilon, t, noise=noise, algorithm=algorithm) for t in range(trials)]
        assert sum(each.refuted for each in found) == refuted
        assert all(each.could_refute for each in found)
        assert all((each.epsilon > epsilon) == each.refuted for each in found)


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize(
    "algorithm, sampling, correlated",
    [*itertools.product([ULS, ELS], [CYCLIC], [False, True]), (ULS, ALLOCATION, False)],
)
def test_users_whose_turns_are_kept_are_not_refuted_and_users_redrawn_in_every_step_are(
    algorithm, sampling, correlated
):
    own = {"algorithm": algorithm, "sampling": sampling, "correlated": correlated}
    own |= {"share": 0.12, "steps": 2 * BANDS}
    kept, redrawn = (audited(1.0, 0, **own, redrawn=each) for each in (False, True))
    assert not kept.refuted and redrawn.refuted


def arguments(texts, run_dir, algorithm, **flags):
    flags = {"data": texts, "run-dir": run_dir, "epsilon": 4, "delta": 1e-6, "num-steps": 3} | {
        "batch_size": 60, "max-length": 24, "seed": 3, "engine": "local", "model": "micro",
        "gradient-canaries": 60, **flags,
    }  # fmt: skip
    words = [str(x) for name, value in flags.items() for x in (f"--{name}", value)]
    return ["audit", algorithm, *words]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.parquet", num_users=80)


def run(args, capsys):
    """(exit code, the JSON object)."""
    capsys.readouterr()
    try:
        main([*map(str, args), "--json"])
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code, json.loads(capsys.readouterr().out)


def with_noise(monkeypatch, algorithm, share):
    """Train with a share of the noise."""

    def with_less(grad_sum, *, noise_multiplier, **options):
        return noisy_mean(grad_sum, noise_multiplier=share * noise_multiplier, **options)

    monkeypatch.setattr(f"fedsim.{algorithm}.noisy_mean", with_less)


NO, YES, FEW = (False, True), (True, True), (False, False)


def result(guesses=NO, noise=False, done=9, curve=NO):
    """The content of audit.json; tests by guesses as (refuted, could refute)."""
    numbers = {"correct": 5, "guesses": 9, "epsilon": 1.0, "noise_multiplier": 1.0, "claimed": 1.0}
    by_curve, by_guesses = ({"refuted": x[0], "could_refute": x[1]} for x in (curve, guesses))
    return {
        **{"epsilon": 4.0, "confidence": 0.999, "num_steps": 9, "steps_done": done},
        **{"curve": numbers | by_curve, "guesses": numbers | by_guesses},
        "noise": numbers | {"refuted": noise},
    }


@pytest.mark.privacy
@pytest.mark.parametrize(
    "given, holds, verdict",
    [
        (result(YES), False, "THE CLAIM IS REFUTED, by: guesses"),
        (result(), True, "not refuted"),
        (result(done=2), None, "INCONCLUSIVE: stopped after 2 of 9"),
        (result(FEW), None, "INCONCLUSIVE: so few canaries"),
        (result(curve=FEW), True, "not refuted"),
        (result(YES, curve=YES), False, "THE CLAIM IS REFUTED, by: curve; guesses"),
        (result(FEW, noise=True), False, "THE CLAIM IS REFUTED, by: noise"),
    ],
)
def test_a_verdict_is_about_what_is_claimed(given, holds, verdict):
    found = judge(given)
    assert found["holds"] is holds
    assert found["verdict"].startswith(f"at most 4.000 is claimed: {verdict}")
    said = sentence({**given, **found})
    assert found["verdict"] in said and "probability <= 0.001." in said
    assert all(f"{name}: {each}" in said for name, each in found["verdicts"].items())


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("noise, holds", [(1.0, True), (0.1, False)])
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_the_command_with_its_own_canaries_refutes_a_tenth_of_the_noise_alone(
    algorithm, noise, holds, texts, run_dir, capsys, monkeypatch
):
    with_noise(monkeypatch, algorithm, noise)
    flags = {"epsilon": 1, "num-steps": 4, "batch_size": 260, "gradient-canaries": 400}
    flags |= {"group-size": 3} if algorithm == "els" else {}
    code, found = run(arguments(texts, run_dir, algorithm, **flags), capsys)
    assert (code, found["holds"]) == (0 if holds else 1, holds), found["verdict"]
    assert json.loads((run_dir / "audit.json").read_text()) == found
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["purpose"], summary["planted"]) == ("audit", {"gradient": 400})
    code, checked = run(["verify", run_dir], capsys)  # what it made up is not kept
    verdicts = {each["promise"]: each["holds"] for each in checked["checks"]}
    unseen = {promise for promise, kept in verdicts.items() if kept is None}
    assert code == 0 and unseen == {"data", "outside", "draws"}
    with pytest.raises(SystemExit):
        main(["report", str(run_dir)])
    assert "an audit's run" in capsys.readouterr().err and not (run_dir / "report.html").exists()


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize(
    "flags, noise, code",
    [
        ({}, 0.5, 1),
        ({}, 0.9, 1),
        ({"noise": "correlated", "bands": 3}, 1.0, 0),
        ({"clip-quantile": 0.5, "loss-bound": 5}, 1.0, 0),
    ],
)
def test_noise_that_is_missing_shows_in_the_length_of_what_is_released(
    flags, noise, code, texts, run_dir, capsys, monkeypatch
):
    with_noise(monkeypatch, "uls", noise)
    few = {"gradient-canaries": 10, "batch_size": 12}
    given, found = run(arguments(texts, run_dir, "uls", **few, **flags), capsys)
    sigma = found["noise_multiplier"]
    assert given == code and found["noise"]["refuted"] is bool(code)
    assert found["noise"]["claimed"] == sigma
    assert noise * sigma < found["noise"]["noise_multiplier"] < 1.1 * noise * sigma
    if code:
        assert found["verdict"].endswith("THE CLAIM IS REFUTED, by: noise")


@pytest.mark.parametrize(
    "algorithm, flags, said",
    [
        ("uls", ["--resume"], "resume=True: expected a new run"),
        ("uls", ["--epsilon", "inf"], "epsilon=inf: expected a finite one"),
        ("els", [], "group_size=None"),
        ("shared", [], "expected texts with one owner each"),
    ],
)
def test_what_is_not_attacked_is_refused(algorithm, flags, said, texts, chat, run_dir, capsys):  # noqa: F811
    words = ["audit", *command("uls", chat, run_dir, group_size=2)[1:]]
    if algorithm != "shared":
        words = arguments(texts, run_dir, algorithm)
    with pytest.raises(SystemExit) as stop:
        main([*words, *flags])
    assert stop.value.code == 2 and said in capsys.readouterr().err
