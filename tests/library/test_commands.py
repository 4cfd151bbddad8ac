"""`fedsim.recommend` and `audit`: objects, and only warnings on the terminal."""

import json

import pytest

import fedsim
from fedsim.cli.main import main
from fedsim.tuning import report

POSTS = [{"author": f"a{i % 60}", "body": f"The court of the {i}th day."} for i in range(600)]
TINY = {"user": "author", "text": "body", "max_length": 24, "model": "micro", "engine": "local"}
TINY |= {"strategy": "scan", "rows_per_pass": 2}


def silent(capfd):
    """True if there was nothing but warnings."""
    out, err = capfd.readouterr()
    return not out and all(line.startswith("warning: ") for line in err.splitlines())


def test_a_recommendation_is_that_of_the_command_and_can_be_trained(tmp_path, capfd):
    given = {"epsilon": 8.0, "num_steps": 3, "batch_size": 12, "run_dir": tmp_path / "runs"}
    advice = fedsim.recommend(POSTS, plan_only=True, log_to=["tensorboard"], **given, **TINY)
    assert silent(capfd)
    flags = {n: v for n, v in {**advice.settings, **given}.items() if n in given or n == "data"}
    flags |= {n: v for n, v in TINY.items() if n not in ("user", "text")}
    flags |= {"user_column": "author", "text_column": "body"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    main(["recommend", *words, "--plan-only", "--json"])
    said = json.loads(capfd.readouterr().out)
    assert said == json.loads(json.dumps(advice.details))
    assert str(advice) == report(dict(advice.details)) and advice.algorithm == said["recommended"]
    better = advice.els if advice.algorithm == "els" else advice.uls
    assert better.settings == advice.settings and better.group_size == advice.settings["group_size"]
    run = fedsim.train(advice.algorithm, **advice.settings)
    assert run.finished and run.run_dir == tmp_path / "runs" / advice.algorithm


@pytest.mark.slow
@pytest.mark.ci
def test_an_audit_says_what_it_found(tmp_path, capfd):
    given = {"epsilon": 4.0, "num_steps": 2, "batch_size": 12, "run_dir": tmp_path / "audit"}
    found = fedsim.audit("uls", POSTS, gradient_canaries=20, **given, **TINY)
    assert silent(capfd)
    written = json.loads((tmp_path / "audit/audit.json").read_text())
    assert found.verdict == written["verdict"] and found.holds is written["holds"]
    assert 0 < found.epsilon <= 4 and found.verdicts["length of the noise"] == "not refuted"
    assert (
        str(found).startswith(f"epsilon: {found.verdict}") and found.run_dir == tmp_path / "audit"
    )


def test_a_stopped_audit_that_refutes_says_so_with_its_exit_code(monkeypatch, capsys):
    for holds, code in ((False, 1), (None, None)):
        result = {"steps_done": 1, "num_steps": 2, "holds": holds}
        monkeypatch.setattr("fedsim.trust.audit", lambda *_, found=result: found)
        monkeypatch.setattr("fedsim.engine.set_threads", lambda _: None)
        words = ["audit", "uls", "--data", "pydocs", "--epsilon", "1", "--num-steps", "2"]
        if code is None:
            main([*words, "--run-dir", "x", "--json"])
        else:
            with pytest.raises(SystemExit) as stop:
                main([*words, "--run-dir", "x", "--json"])
            assert stop.value.code == code
    capsys.readouterr()
