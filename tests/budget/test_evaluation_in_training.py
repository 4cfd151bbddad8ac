"""Held-out loss while a run trains: with noise, once for each step, counted, and nothing else."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from problems import SoftmaxTask
from test_verify import write_texts

from fedsim import accounting
from fedsim.accounting import StepEvent
from fedsim.budget.ledger import open_locked, place_of
from fedsim.cli.main import main
from fedsim.config import PrivacyConfig, run_config
from fedsim.data.building.build import build
from fedsim.data.dataset import Dataset
from fedsim.engine.worker import LocalEngine
from fedsim.errors import FileDamaged
from fedsim.keys import SecretKey
from fedsim.library.run import train
from fedsim.plan import Evaluations, evaluations_of
from fedsim.run import metrics
from fedsim.training import Callback, private_evaluation
from fedsim.training.private_evaluation import FILE, noisy_evaluate, rows_of_users

SHOWN = "eval/loss"


def private(**changes):
    fields = {"epsilon": 1.0, "num_steps": 20, "eval_epsilon": 1.0, **changes}
    return PrivacyConfig(**fields)


@pytest.mark.parametrize("num_steps", [1, 7, 20, 101])
@pytest.mark.parametrize("every", [None, 1, 3, 50])
def test_the_plan_pays_for_every_evaluation_that_there_can_be(num_steps, every):
    run = run_config(data="x", run_dir="x", eval_every=every, eval_examples=100)
    users = SimpleNamespace(num_users=40, vocab_size=256, offsets=np.arange(0, 401, 10))
    found = evaluations_of(private(num_steps=num_steps), run, users)
    assert found is not None
    due = [s for s in range(num_steps + 1) if s % found.every == 0 or s == num_steps]
    assert len(due) == found.count
    spent = accounting.epsilon([(StepEvent(found.noise_multiplier, 1.0), len(due))], 1e-6)
    assert 1 - 1e-3 < spent <= 1
    assert (found.num_users, found.rows) == (40, 2) and found.loss_bound == math.log(256)
    groups = rows_of_users(users.offsets, found.num_users, found.rows)
    assert [len(rows) for rows in groups] == [2] * 40 and groups[1].tolist() == [10, 19]


@pytest.mark.privacy
@pytest.mark.parametrize("delta, expected", [(1e-9, 1e-9), (0.5, 1e-6), (None, 1e-6)])
def test_evaluations_have_the_delta_of_the_run_where_it_is_smaller(delta, expected):
    run = run_config(data="x", run_dir="x")
    users = SimpleNamespace(num_users=40, vocab_size=256)
    found = evaluations_of(private(delta=delta), run, users)  # type: ignore
    assert found is not None and found.delta == expected
    assert 1 - 1e-3 < accounting.epsilon(found.phases(found.count), found.delta) <= 1


def problem(rng, sizes):
    """(engine, data, parameters) of a classification with held-out users of these sizes."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    task = SoftmaxTask(
        rng.normal(size=(sum(sizes), 5)).astype(np.float32), rng.integers(4, size=sum(sizes)), 4
    )
    store = SimpleNamespace(offsets=offsets, num_users=len(sizes))
    data = Dataset(train=store, eval_users=store)  # type: ignore[arg-type]
    return LocalEngine(task, num_lanes=1), data, rng.normal(size=(5, 4)).astype(np.float32)


@pytest.mark.privacy
def test_what_is_released_has_the_noise_of_the_plan_and_a_user_moves_it_by_little(
    rng, tmp_path, monkeypatch
):
    sizes = [3, 0, 1, 20, 2] * 4
    engine, data, theta = problem(rng, sizes)
    how = Evaluations(1.0, 1e-3, 3.0, 1, 400, len(sizes), 4, 2.0)
    key = SecretKey.create(seed=1)

    def released(step, place):
        place.mkdir()
        return noisy_evaluate(engine, theta, data, how, key, step, place, print)[SHOWN]

    groups = rows_of_users(data.eval_users.offsets, how.num_users, how.rows)
    task = engine._worker.task
    losses = [float(np.mean(task.losses(theta, task.read("train", rows)))) for rows in groups]
    clear = (sum(min(loss, 2.0) for loss in losses) + sizes.count(0) * 1.0) / len(sizes)
    stddev = how.noise_multiplier * how.loss_bound / 2 / how.num_users
    # Of one user all texts are others, under the same noise.
    before = released(0, tmp_path / "before")
    kept = task.features[groups[0]].copy()
    for scale in (-1.0, 1e6):
        task.features[groups[0]] = scale * kept
        moved = abs(released(0, tmp_path / f"{scale}") - before)
        assert moved <= how.loss_bound / len(sizes) + 2.0**-8 * stddev
    monkeypatch.setattr(engine, "group_losses", lambda *_: np.array(losses))
    found = np.array([released(step, tmp_path / f"{step}") for step in range(400)])
    assert found[0] == pytest.approx(before, abs=1e-6)
    assert abs(found.mean() - clear) < 5 * stddev / 20
    assert abs(found.std() / stddev - 1) < 0.15 and len(set(found)) > 300


def test_a_step_is_released_once(rng, tmp_path, monkeypatch):
    engine, data, theta = problem(rng, [2] * 6)
    args = Evaluations(1.0, 1e-3, 3.0, 1, 4, 6, 2, 5.0), SecretKey.create()
    noted = []
    about = (tmp_path, lambda count, chain: noted.append(count))
    first = noisy_evaluate(engine, theta, data, *args, 5, *about)
    assert noted == [1]  # by which the ledger of the data knows an older copy
    monkeypatch.setattr(private_evaluation, "noisy_mean_loss", None)  # nothing is computed again
    for params, again in ((theta, True), (theta + 1, False)):  # those of the step may be lost
        found = noisy_evaluate(engine, params, data, *args, 5, *about, again=again)
        assert found == (first if again else None)
    (line,) = (tmp_path / FILE).read_text().splitlines()
    assert json.loads(line) == {"step": 5, "loss": first[SHOWN]}
    (tmp_path / FILE).write_text(line + "\n" + line + "\n")
    with pytest.raises(FileDamaged, match="once"):
        noisy_evaluate(engine, theta, data, *args, 6, *about)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    place = tmp_path_factory.mktemp("noisy-evaluations")
    build(
        write_texts(place / "t.parquet", num_users=60),
        place / "data",
        max_length=24,
        eval_users=0.3,
    )
    return place / "data"


@pytest.fixture(autouse=True)
def ledger(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(tmp_path / "ledger"))


def arguments(texts, run_dir, **flags):
    flags = {"data": texts, "run_dir": run_dir, "epsilon": 1, "delta": 1e-3, **flags}
    flags = {"num_steps": 4, "eval_every": 2, "batch_size": 12, "model": "micro", **flags}
    flags = {"engine": "local", "strategy": "scan", "rows_per_pass": 2, **flags}
    flags = {"eval_epsilon": 1.5, **flags}
    return ["train", "uls", *(str(x) for n, v in flags.items() for x in (f"--{n}", v))]


def shown(run_dir):
    """The losses among the metrics, by step."""
    return {line["step"]: line[SHOWN] for line in metrics.read(run_dir) if SHOWN in line}


@pytest.mark.slow
@pytest.mark.privacy
def test_every_number_of_a_training_has_noise_and_is_counted(texts, run_dir, capsys):
    main([*arguments(texts, run_dir), "--json"])
    summary, losses = json.loads(capsys.readouterr().out), shown(run_dir)
    released = [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]
    assert losses == {each["step"]: each["loss"] for each in released} and [*losses] == [0, 2, 4]
    assert [summary["initial_eval_loss"], summary["final_eval_loss"]] == [losses[0], losses[4]]
    names = set().union(*metrics.read(run_dir))
    assert "non_private/eval_examples_loss" not in names
    how, held = Evaluations(**summary["evaluations"]), Dataset.open(texts).eval_users
    assert (how.count, how.num_users, how.epsilon) == (3, held.num_users, 1.5)
    with open_locked(place_of(None)) as ledger:
        entries = {each.kind: each for each in ledger.entries.values()}
        seen = ledger.users_of(entries["evaluation"].users).tolist()
        assert seen == ledger.users(held.user_ids()).tolist()
    assert entries["evaluation"].planned == how.phases(3) == entries["evaluation"].released
    place = place_of(None) / "budget.jsonl"
    counted = place.read_bytes()
    main(["verify", str(run_dir), "--whole"])
    assert place.read_bytes() == counted  # what was computed again is no release
    main(["report", str(run_dir)])
    said = capsys.readouterr().out
    assert "evaluations" in said and "VIOLATED" not in said
    page = (run_dir / "report.md").read_text()
    assert "evaluations cost each of these users epsilon = 1.5" in page
    assert "without noise" not in page.split("texts of held-out users")[1].split("\n")[0]


@pytest.mark.slow
@pytest.mark.privacy
def test_a_run_goes_on_with_the_held_out_users_that_it_began_with(tmp_path, run_dir, capsys):
    """Were one missing, another might count twice."""
    table = pq.read_table(write_texts(tmp_path / "t.parquet", num_users=60))
    build(tmp_path / "t.parquet", tmp_path / "data", max_length=24, eval_users=0.3)
    before = Dataset.open(tmp_path / "data")
    main(arguments(tmp_path / "data", run_dir))
    gone = pc.equal(table["user_id"], before.eval_users.user_ids()[0])
    pq.write_table(table.filter(pc.invert(gone)), tmp_path / "t.parquet")
    shutil.rmtree(tmp_path / "data")
    build(tmp_path / "t.parquet", tmp_path / "data", max_length=24, eval_users=0.3)
    assert Dataset.open(tmp_path / "data").train.fingerprint == before.train.fingerprint
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*arguments(tmp_path / "data", run_dir), "--resume"])
    assert "expected the held-out users that the run started with" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", str(run_dir)])
    assert "other held-out users than at the start" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.privacy
def test_the_loss_as_it_is_goes_nowhere(texts, run_dir, capsys, monkeypatch):
    """Were what is released always 1.25, nobody would see another loss."""
    monkeypatch.setattr(private_evaluation, "noisy_mean_loss", lambda losses, **_: 1.25)
    called = []

    class Watch(Callback):
        reads_non_private = True

        def on_step(self, step, metrics):
            called.append(metrics[SHOWN])

    result = train(
        "uls", data=texts, run_dir=run_dir, epsilon=1, delta=1e-3, num_steps=4, batch_size=12,
        model="micro", engine="local", strategy="scan", rows_per_pass=2,
        eval_epsilon=1.5, eval_every=2,
        callbacks=[Watch()],
    )  # fmt: skip
    assert set(called) == set(shown(run_dir).values()) == {1.25}
    assert result.eval_loss == result.summary["initial_eval_loss"] == 1.25
    clear = {f"{loss:.4g}" for loss in result.evaluate().values() if isinstance(loss, float)}
    capsys.readouterr()
    for path in run_dir.rglob("*.json*"):
        assert not any(f": {loss}" in path.read_text() for loss in clear), path


@pytest.mark.slow
@pytest.mark.privacy
def test_a_run_that_goes_on_evaluates_no_step_again(texts, run_dir, capsys, monkeypatch):
    args = arguments(texts, run_dir, num_steps=6, checkpoint_every=1)
    main(args)
    before, lines = shown(run_dir), (run_dir / FILE).read_text()
    for path in sorted((run_dir / "checkpoints").glob("*"))[1:]:
        path.unlink()  # as if it had been killed after an earlier one
    monkeypatch.setattr(private_evaluation, "noisy_mean_loss", None)
    main([*args, "--resume"])
    assert shown(run_dir) == before and (run_dir / FILE).read_text() == lines
    summary = json.loads((run_dir / "summary.json").read_text())
    # That of step 6 is of parameters that were lost; these have no loss that may be released.
    assert (summary["lost_steps"], summary["steps_done"]) == (1, 6)
    assert summary["final_eval_loss"] == "nan" and summary["initial_eval_loss"] == before[0]
    with pytest.raises(SystemExit) as stop:
        main([*arguments(texts, run_dir, num_steps=6, eval_epsilon=3), "--resume"])
    assert stop.value.code == 2 and "eval_epsilon=3.0: expected 1.5" in capsys.readouterr().err


def broken(run_dir, what):
    lines = (run_dir / FILE).read_text()
    if what == "another loss is shown":
        path = run_dir / "metrics.jsonl"
        loss = str(json.loads(lines.splitlines()[0])["loss"])
        path.write_text(path.read_text().replace(loss, "1.5"))
    elif what == "one more was released":
        (run_dir / FILE).write_text(lines + '{"step": 3, "loss": 1.5}\n')
    else:
        (run_dir / FILE).write_text(lines + '{"step": 2, "loss": 1.5}\n')


@pytest.mark.slow
@pytest.mark.privacy
def test_verify_sees_what_was_not_planned(texts, run_dir, capsys):
    main(arguments(texts, run_dir))
    kept = {name: (run_dir / name).read_text() for name in (FILE, "metrics.jsonl")}
    for what in ("another loss is shown", "one more was released", "one was released twice"):
        broken(run_dir, what)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["verify", str(run_dir), "--json"])
        checks = {
            each["promise"]: each["holds"] for each in json.loads(capsys.readouterr().out)["checks"]
        }
        assert stop.value.code == 1 and checks["evaluations"] is False, what
        for name, text in kept.items():
            (run_dir / name).write_text(text)


@pytest.mark.slow
@pytest.mark.privacy
def test_a_limit_of_held_out_users_is_kept(texts, run_dir, capsys, monkeypatch):
    monkeypatch.setattr("fedsim.config.privacy.MAX_DELTA", 1.0)  # the numbers are of delta N^-1.1
    for flags in ({"limit_epsilon": 1.2}, {}):
        if not flags:
            main(["budget", "--limit-epsilon", "1.2", "--delta", "0.001"])
        with pytest.raises(SystemExit) as stop:
            main(arguments(texts, run_dir, **flags))
        assert stop.value.code == 2 and not run_dir.exists()
        assert "limit_epsilon=1.2: expected a run that fits" in capsys.readouterr().err
    main(arguments(texts, run_dir, eval_epsilon=0.5))
