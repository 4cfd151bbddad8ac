"""fedsim from Python: what the command does, with the same bits."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from refused import refuses

import fedsim
from fedsim.cli.main import main

SETTINGS = {
    **{"epsilon": 8.0, "num_steps": 3, "batch_size": 12, "max_length": 24, "seed": 5},
    **{"model": "micro", "engine": "local", "strategy": "scan", "rows_per_pass": 2},
    **{"eval_examples": 8, "checkpoint_every": 1},
}


@pytest.fixture(scope="module")
def posts():
    rng = np.random.default_rng(0)
    authors = [f"author{u}" for u in range(40) for _ in range(1 + u % 7)]
    bodies = [" ".join(rng.choice(["red", "green", "blue"], 5)) for _ in authors]
    return pd.DataFrame({"author": authors, "likes": range(len(authors)), "body": bodies})


@pytest.fixture(scope="module")
def files(posts, tmp_path_factory):
    """The same rows in a file."""
    directory = tmp_path_factory.mktemp("posts")
    pq.write_table(pa.Table.from_pandas(posts), directory / "all.parquet")
    return directory


def train(data, run_dir, call=fedsim.train, **changed):
    given = {"user": "author", "text": "body", "run_dir": run_dir, **SETTINGS, **changed}
    return call("uls", data, **given)


@pytest.fixture(scope="module")
def run(posts, tmp_path_factory):
    return train(posts, tmp_path_factory.mktemp("library") / "run")


def test_importing_it_loads_nothing_and_shows_what_there_is():
    code = (
        "import sys, fedsim; heavy = {'jax', 'numpy', 'ray', 'scipy'} & sys.modules.keys(); "
        "sys.exit(bool(heavy) or 'train' not in dir(fedsim))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    for name in fedsim.__all__:
        assert getattr(fedsim, name) is not None
    with pytest.raises(AttributeError, match="fedsim.*trian"):
        _ = fedsim.trian


def test_a_run_has_what_came_out(run):
    assert 7.9 < run.epsilon <= 8 and run.delta == 1e-6
    assert 0 < run.eval_loss == run.summary["final_eval_loss"] and run.finished
    assert run.stored.run.data.source.endswith(".parquet")
    sizes = [leaf.size for leaf in fedsim.library.run.checkpoint.jax.tree.leaves(run.params)]
    assert sum(sizes) == run.summary["num_parameters"]
    assert "uls, 3 of 3 steps" in repr(run) and "no guarantee" in repr(run)  # it has a seed
    assert fedsim.load(run.run_dir).summary == run.summary


def test_the_command_gives_the_same_bits(run, files, run_dir, capsys):
    flags = [x for n, v in SETTINGS.items() for x in (f"--{n.replace('_', '-')}", str(v))]
    columns = ["--user-column", "author", "--text-column", "body"]
    place = ["--data", str(files / "all.parquet"), "--run-dir", str(run_dir)]
    main(["train", "uls", *place, *columns, *flags, "--json"])
    assert json.loads(capsys.readouterr().out)["params_sha256"] == run.summary["params_sha256"]


def test_a_dry_run_gives_the_plan_and_leaves_nothing(run, posts, run_dir, capsys):
    plan = train(posts, run_dir, call=fedsim.dry_run, engine="ray")  # which needs no worker
    assert plan == run.stored.plan.as_dict() | {"data_seal": plan["data_seal"]}
    assert "noise multiplier" in capsys.readouterr().err and not run_dir.exists()


def test_a_run_is_verified_reported_and_written_for_others(run, tmp_path):
    checks = run.verify()
    assert {check.promise for check in checks} >= {"ledger", "epsilon", "data", "draws"}
    assert all(check.holds for check in checks)
    found = run.report(tmp_path)
    assert (tmp_path / "report.html").exists() and "epsilon = 8.0000" in found["claim"]
    assert isinstance(run.generate("red ", max_tokens=3, temperature=0), str)
    for name, value in {"max_tokens": -3, "top_p": 2.0}.items():
        with refuses(f"{name}={value}"):
            run.generate(**{name: value})
    assert (run.to_hf(tmp_path / "hf") / "model.safetensors").exists()
    assert run.evaluate()["eval/loss"] > 0
    with refuses("adapter=True"):
        run.to_peft(tmp_path / "peft")


@pytest.mark.slow
def test_adapters_of_an_exported_model_name_their_base(run, posts, tmp_path, monkeypatch):
    model = run.to_hf(tmp_path / "base")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(model))
    tuned = train(posts, tmp_path / "run", model="hf:some/model@v1", lora_rank=2, num_steps=1)
    assert tuned.summary["num_parameters"] < run.summary["num_parameters"]
    adapters = tuned.to_peft(tmp_path / "peft")
    fields = json.loads((adapters / "adapter_config.json").read_text())
    assert (fields["base_model_name_or_path"], fields["revision"]) == ("some/model", "v1")
    assert "base_model: some/model\n" in (adapters / "README.md").read_text()


def test_what_no_run_can_be_made_of_is_refused_before_a_step_is_paid_for(posts, run_dir):
    late = type("Late", (fedsim.Callback,), {"on_stepp": print})()
    faults = {"[3]": [3], str(print): print, "Late.on_stepp": [late]}
    for shown, callbacks in faults.items():
        with refuses(f"callbacks={shown}", says="on_step" if "on_" in shown else "a list of"):
            train(posts, run_dir, callbacks=callbacks)
    with refuses("dry_run=True", says="fedsim.dry_run plans without training"):
        train(posts, run_dir, dry_run=True)
    with refuses("algorithm=dls"):
        fedsim.train("dls", posts, epsilon=8, num_steps=1)
    with refuses("run_dir", says="directory of the run to resume"):  # else a new one is paid for
        fedsim.train("uls", posts, epsilon=8, num_steps=1, resume=True)
    assert not run_dir.exists()


def test_a_directory_without_a_run_and_a_run_that_has_not_ended(tmp_path, run):
    with refuses(f"run={tmp_path}", says="the directory of a run"):
        fedsim.load(tmp_path)
    (tmp_path / "config.json").write_bytes((run.run_dir / "config.json").read_bytes())
    begun = fedsim.load(tmp_path)
    assert "not ended" in repr(begun)
    with refuses(f"run={tmp_path}", says="has ended"):
        _ = begun.epsilon
