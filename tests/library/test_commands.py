"""`fedsim.recommend` and `audit`: answers of the commands, only warnings on the terminal."""

import importlib
import json
from types import SimpleNamespace

from refused import refuses

import fedsim
from fedsim.cli.main import main
from fedsim.keys import SecretKey

POSTS = [{"author": f"a{i % 60}", "body": f"The court of the {i}th day."} for i in range(600)]
TINY = {"user": "author", "text": "body", "max_length": 24, "model": "micro", "engine": "local"}
TINY |= {"strategy": "scan", "rows_per_pass": 2}


def silent(capfd):
    """True if there was nothing but warnings."""
    out, err = capfd.readouterr()
    return not out and all(line.startswith("warning: ") for line in err.splitlines())


def test_a_recommendation_is_that_of_the_command_and_can_be_trained(tmp_path, capfd, monkeypatch):
    given = {"epsilon": 8.0, "num_steps": 3, "batch_size": 12, "run_dir": tmp_path / "runs"}
    key = SecretKey.create(3)  # of the samples
    tuning = importlib.import_module("fedsim.tuning.recommend")
    monkeypatch.setattr(tuning, "SecretKey", SimpleNamespace(create=lambda *_: key))
    advice = fedsim.recommend(POSTS, log_to=["tensorboard"], **given, **TINY)
    assert silent(capfd)
    best = advice["recommended"]
    settings = advice[best]["settings"]
    flags = given | {n: v for n, v in TINY.items() if n not in ("user", "text")}
    flags |= {"user_column": "author", "text_column": "body", "data": settings["data"]}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    main(["recommend", *words, "--json"])
    assert json.loads(capfd.readouterr().out) == json.loads(json.dumps(advice))
    run = fedsim.train(best, **settings)
    assert run.finished and run.run_dir == tmp_path / "runs" / best
    with refuses("clip_norm=2.0"):
        fedsim.recommend(POSTS, clip_norm=2.0, **given, **TINY)
