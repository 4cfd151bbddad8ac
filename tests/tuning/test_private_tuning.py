# ruff: noqa: F401, F811
"""Training with what is chosen privately: its cost is in the ledger, the epsilon and the report."""

import json

import pytest
from test_cli import run, texts, train_args

from fedsim import accounting
from fedsim.accounting import PureEvent, StepEvent
from fedsim.cli.main import main
from fedsim.mechanism import AdaptiveClip, NoisyLoss
from fedsim.run import ledger, metrics
from fedsim.sampling.contributions import GRID


def trained(algorithm, texts, run_dir, capsys, *more, **flags):
    own = {"group_size": 2, "strategy": "scan", "rows_per_pass": 2, **flags}
    args = train_args(texts, run_dir, **own)
    code, out, err = run("train", algorithm, *args, *more, "--json", capsys=capsys)
    assert code == 0, err
    return json.loads(out), err


def logged(run_dir, name):
    """The values of a metric, step by step."""
    return [line[name] for line in metrics.read(run_dir) if name in line]


@pytest.mark.slow
@pytest.mark.privacy
def test_a_private_group_size_is_part_of_epsilon(texts, run_dir, capsys):
    flags = {"group_size": None, "group_size_epsilon": 0.5}
    summary, _ = trained("els", texts, run_dir, capsys, **flags)
    assert summary["group_size"] in GRID
    assert not any(fact["fact"] == "group-size" for fact in summary["non_private"])
    step = StepEvent(summary["noise_multiplier"], summary["sampling_prob"], summary["group_size"])
    expected = accounting.epsilon([(PureEvent(0.5), 1), (step, 3)], summary["delta"])
    assert summary["epsilon"] == expected and 7.9 < expected <= 8
    assert summary["group_size_epsilon"] == 0.5
    assert ledger.head(run_dir)["plan"]["group_size_epsilon"] == 0.5
    assert logged(run_dir, "privacy/epsilon")[-1] == pytest.approx(expected, rel=1e-3)
    again, _ = trained("els", texts, run_dir, capsys, "--resume", **flags)
    assert again["group_size"] == summary["group_size"]  # the same draw, no second release


@pytest.mark.slow
@pytest.mark.privacy
@pytest.mark.parametrize("quantile, bound", [(None, 6.0), (0.5, 6.0), (0.5, None)])
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_more_releases_of_a_step_cost_nothing(algorithm, quantile, bound, texts, run_dir, capsys):
    """Against the accountant of all that a step releases: the events compose to that of a step."""
    flags = {"loss_bound": bound, "clip_quantile": quantile, "clip_norm": 0.1}
    flags = {name: value for name, value in flags.items() if value is not None}
    summary, _ = trained(algorithm, texts, run_dir, capsys, **flags)
    z, gradient = summary["noise_multiplier"], summary["gradient_noise_multiplier"]
    step = StepEvent(z, summary["sampling_prob"], 2 if algorithm == "els" else 1)
    assert summary["epsilon"] == accounting.epsilon([(step, 3)], summary["delta"])
    parts = [gradient]
    if bound:
        parts.append(NoisyLoss(bound, summary["expected_count"], z).stddev)
        noisy, clear = (logged(run_dir, f"{kind}/loss") for kind in ("privacy", "non_private"))
        assert len(noisy) == len(clear) == 3 and not set(noisy) & set(clear)
    if quantile:
        parts.append(2 * AdaptiveClip(quantile, summary["expected_count"], z).count_stddev)
        norms = logged(run_dir, "privacy/clip_norm")
        assert norms[0] == 0.1 and len(set(norms)) == 3
        assert summary["final_clip_norm"] not in norms  # of the step after the last
    assert sum(part**-2 for part in parts) == pytest.approx(z**-2, rel=1e-12)
    assert z < gradient < 1.03 * z
    main(["verify", str(run_dir), "--replay"])
    assert "VIOLATED" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_goes_on_with_the_clip_norm_of_its_checkpoint(texts, run_dir, capsys):
    flags = {"clip_quantile": 0.5, "num_steps": 6, "checkpoint_every": 2}
    whole, _ = trained("uls", texts, run_dir, capsys, **flags)
    norms = logged(run_dir, "privacy/clip_norm")
    for path in sorted((run_dir / "checkpoints").glob("*"))[1:]:
        path.unlink()  # as if it had been killed after an earlier one
    (step,) = {int(path.stem.split("-")[1]) for path in (run_dir / "checkpoints").glob("*.safe*")}
    again, _ = trained("uls", texts, run_dir, capsys, "--resume", **flags)
    assert again["final_clip_norm"] == norms[step] and again["lost_steps"] == 6 - step
    assert (again["steps_done"], again["epsilon"]) == (6, whole["epsilon"])
