"""What a person reads, and that no epsilon is shown for more than it is."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from fedsim.config import Algorithm, run_config
from fedsim.plan import Caveat, Evaluations, Fact, Plan, SamplingPlan
from fedsim.run.console import Console, guarantee_line, plan_rows

WORKERS = SimpleNamespace(num_lanes=8, describe=lambda: "2 processes, 1 CPU thread each")
RUN = run_config(
    data="pydocs", run_dir="r", optimizer="momentum", learning_rate=0.28, schedule="constant",
    ema=0.9,
)  # fmt: skip
PLAN = Plan(
    algorithm=Algorithm.ELS, num_users=1200, num_examples=56_000, num_units=9000, num_steps=20,
    batch_size=64, group_size=8, expected_count=64,
    sampling=SamplingPlan("poisson", prob=64 / 9000),
    clip_norm=0.5, clipping="normalised", target_epsilon=4.0, delta=1e-6, noise_multiplier=1.25,
    num_parameters=123_456, data_seal="abc",
    non_private=(Caveat(Fact.COUNTS), Caveat(Fact.GROUP_SIZE)),
)  # fmt: skip
SUMMARY = {
    **PLAN.as_dict(), "epsilon": 3.98766, "adjacency": "add or remove one user", "steps_done": 20,
    "epsilon_holds": "add or remove one user", "initial_eval_loss": 5.5, "final_eval_loss": 4.25,
    "gradients_computed": 1290, "wall_seconds": 12.3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def replaced(**fields):
    return Plan.from_dict({**PLAN.as_dict(), **fields})


def shown(capsys):
    """The lines on stderr; there is nothing on stdout and no control code anywhere."""
    out, err = capsys.readouterr()
    assert out == "" and not re.search(r"[\x1b\r]", err)
    return err.splitlines()


def test_the_plan_names_what_the_guarantee_does_not_cover(capsys):
    Console().plan(PLAN, WORKERS, RUN)
    lines = shown(capsys)
    public, private = PLAN.non_private
    assert lines[-3:-1] == [str(public), f"not private: {private}"]
    assert len(lines) == len(plan_rows(PLAN, WORKERS, RUN)) + 3


@pytest.mark.privacy
def test_losses_that_are_shown_are_not_within_what_the_guarantee_covers(capsys):
    noisy = Evaluations(1.0, 1e-6, 4.4, 1, 2, num_users=11, rows=4, loss_bound=11.0)
    for evaluations, says in ((None, "losses that are shown have"), (noisy, "train loss has")):
        plan = dataclasses.replace(PLAN, non_private=(), evaluations=evaluations)
        Console().plan(plan, WORKERS, RUN)
        *_, last = shown(capsys)
        assert last.startswith("nothing outside the guarantee of model and ledger; the ")
        assert last.endswith(f"the {says} no noise: not to be published")


def test_the_plan_labels_an_epsilon_that_is_no_guarantee():
    four, known = "4 at delta 1.00e-6", Fact.KNOWN_SEED.text
    shown = [(PLAN, four), (replaced(seeded=True), f"{four} (no guarantee: {known})")]
    free = replaced(target_epsilon="inf", noise_multiplier=0.0)
    for plan, epsilon in (*shown, (free, "infinite: no noise, so no privacy")):
        assert dict(plan_rows(plan, WORKERS, RUN))["epsilon"] == epsilon


@pytest.mark.privacy
def test_the_claim_has_the_slack_of_noise_that_is_not_ideal():
    text = guarantee_line({**SUMMARY, "slack": {"epsilon": 0.25, "delta": 0.0}})
    assert "epsilon 4.2377 at" in text


@pytest.mark.parametrize("second, step_s, minutes", [(60.0, 60, 100), (6.0, 13, 23)])
def test_a_log_says_how_long_the_rest_takes_once_all_is_compiled(second, step_s, minutes, capsys):
    with Console().steps(0, 100) as show:
        for step, seconds in enumerate([600.0, second, 20.0, 30.0, 9.0], 1):
            show(step, {"performance/step_seconds": seconds, "eval/loss": 2.0}, 70.0)
    left = f"a step takes {step_s} s, the rest with evaluations about {minutes} minutes"
    assert shown(capsys) == ["step 1/100  held-out loss 2", left]
