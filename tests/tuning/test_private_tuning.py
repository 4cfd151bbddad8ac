"""Training with what is chosen privately: its cost is in the ledger, the epsilon and the report."""

import json
from contextlib import nullcontext

import pytest
from test_cli import run, texts, train_args  # noqa: F401

from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent
from fedsim.cli.main import main
from fedsim.clipping.step_releases import AdaptiveClip, NoisyLoss
from fedsim.run import ledger, metrics
from fedsim.run.console import Console
from fedsim.sampling.contributions import GRID
from fedsim.training import prepare, private_evaluation


def trained(algorithm, texts, run_dir, capsys, *more, **flags):  # noqa: F811
    args = train_args(
        texts, run_dir, **{"group_size": None, "strategy": "scan", "rows_per_pass": 2, **flags}
    )
    code, out, err = run("train", algorithm, *args, *more, "--json", capsys=capsys)
    assert code == 0, err
    return json.loads(out), err


@pytest.mark.slow
@pytest.mark.privacy
def test_a_private_group_size_is_part_of_epsilon(texts, run_dir, capsys, monkeypatch):  # noqa: F811
    summary, err = trained("els", texts, run_dir, capsys, group_size_epsilon=0.5)
    assert summary["group_size"] in GRID
    assert not any(fact["fact"] == "group-size" for fact in summary["non_private"])
    assert "a private median, for epsilon 0.5 of it" in err
    step = StepEvent(summary["noise_multiplier"], summary["sampling_prob"], summary["group_size"])
    expected = accounting.epsilon([(PureEvent(0.5), 1), (step, 3)], summary["delta"])
    assert summary["epsilon"] == expected and 7.9 < expected <= 8
    assert summary["group_size_epsilon"] == 0.5
    head, _, *steps = ledger.read(run_dir)
    assert head["head"]["before"] == [{"what": "group_size", "epsilon": 0.5}]
    logged = [
        line["privacy/epsilon"] for line in metrics.read(run_dir) if "privacy/epsilon" in line
    ]
    assert logged[-1] == pytest.approx(expected, rel=1e-3)
    with monkeypatch.context() as patch:
        shown = []
        patch.setattr(Console, "plan", lambda *_: shown.append("plan"))
        patch.setattr(prepare, "count_at_once", lambda *_: shown.append("counted"))
        patch.setattr(private_evaluation, "admitted", lambda *_: nullcontext(ledger.unnoted))
        trained("els", texts, run_dir.with_name("other"), capsys, group_size_epsilon=0.5)
        assert shown == ["counted", "plan"]
    again, _ = trained("els", texts, run_dir, capsys, "--resume", group_size_epsilon=0.5)
    assert again["group_size"] == summary["group_size"]  # the same draw, no second release


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("algorithm, clipping", [("els", "plain"), ("uls", "normalised")])
def test_a_clip_norm_that_moves_costs_nothing_more(algorithm, clipping, texts, run_dir, capsys):  # noqa: F811
    flags = {"clip_quantile": 0.5, "clip_norm": 0.1, "num_steps": 6, "clipping": clipping}
    summary, _ = trained(algorithm, texts, run_dir, capsys, **flags, group_size=2)
    sigma = summary["noise_multiplier"]
    step = StepEvent(sigma, summary["sampling_prob"], 2 if algorithm == "els" else 1)
    assert summary["epsilon"] == accounting.epsilon([(step, 6)], summary["delta"])
    adaptive = AdaptiveClip(0.5, summary["expected_count"], sigma)
    assert summary["gradient_noise_multiplier"] == adaptive.gradient_noise_multiplier > sigma
    norms = [
        line["privacy/clip_norm"] for line in metrics.read(run_dir) if "privacy/clip_norm" in line
    ]
    assert norms[0] == 0.1 and len(set(norms)) == 6
    assert summary["final_clip_norm"] not in norms  # of the step after the last


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_a_loss_that_is_released_costs_nothing_more(algorithm, quantile, texts, run_dir, capsys):  # noqa: F811
    """Against the accountant of all that a step releases: the events compose to that of a step."""
    flags = {"loss_bound": 6.0, "num_steps": 3, "clip_quantile": quantile, "group_size": 2}
    flags = {name: value for name, value in flags.items() if value is not None}
    summary, _ = trained(algorithm, texts, run_dir, capsys, **flags)
    z, gradient = summary["noise_multiplier"], summary["gradient_noise_multiplier"]
    step = StepEvent(z, summary["sampling_prob"], 2 if algorithm == "els" else 1)
    assert summary["epsilon"] == accounting.epsilon([(step, 3)], summary["delta"])
    parts = [gradient, NoisyLoss(6.0, summary["expected_count"], z).stddev]
    if quantile:
        parts.append(2 * AdaptiveClip(0.5, summary["expected_count"], z).count_stddev)
    assert sum(part**-2 for part in parts) == pytest.approx(z**-2, rel=1e-12)
    assert z < gradient < 1.03 * z
    lines = metrics.read(run_dir)
    found = [line["privacy/loss"] for line in lines if "privacy/loss" in line]
    clear = [line["non_private/loss"] for line in lines if "non_private/loss" in line]
    assert len(found) == len(clear) == 3 and not set(found) & set(clear)
    main(["verify", str(run_dir), "--replay"])
    assert "VIOLATED" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_goes_on_with_the_clip_norm_of_its_checkpoint(texts, run_dir, capsys):  # noqa: F811
    flags = {"clip_quantile": 0.5, "num_steps": 6, "checkpoint_every": 2, "group_size": 2}
    whole, _ = trained("uls", texts, run_dir, capsys, **flags)
    lines = metrics.read(run_dir)
    norms = [line["privacy/clip_norm"] for line in lines if "privacy/clip_norm" in line]
    assert len(set(norms)) == 6
    for path in sorted((run_dir / "checkpoints").glob("*"))[1:]:
        path.unlink()  # as if it had been killed after an earlier one
    (step,) = {int(path.stem.split("-")[1]) for path in (run_dir / "checkpoints").glob("*.safe*")}
    again, _ = trained("uls", texts, run_dir, capsys, "--resume", **flags)
    assert again["final_clip_norm"] == norms[step] and again["lost_steps"] == 6 - step
    assert (again["steps_done"], again["epsilon"]) == (6, whole["epsilon"])
