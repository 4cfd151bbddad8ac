"""The report: what it claims follows from the ledger, whatever else the directory says."""

import json
import shutil

import pytest
import yaml
from test_verify import another_cohort, command, edit_json, edit_lines, write_texts

from fedsim.cli.main import main
from fedsim.plan import Fact
from fedsim.run.console import Console
from fedsim.trust.report import model_card

pytestmark = pytest.mark.slow

RUNS = {
    "private": ("uls", {}),
    "open": ("uls", {"epsilon": "inf"}),
    "seeded": ("uls", {"seed": 3}),
    "els": ("els", {}),
    "removed": ("els", {"adjacency": "add-or-remove"}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directories of finished runs by name; not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    texts = write_texts(directory / "texts.parquet")
    for name, (algorithm, flags) in RUNS.items():
        main(command(texts, directory / name, algorithm, **{"num-steps": 3, **flags}))
    return directory


def read(capsys, run_dir, out):
    """(JSON object, Markdown, HTML)."""
    capsys.readouterr()
    main(["report", str(run_dir), "--out", str(out), "--json"])
    found = json.loads(capsys.readouterr().out)
    return found, (out / "report.md").read_text(), (out / "report.html").read_text()


def test_the_claim_is_what_the_ledger_says_and_names_no_place_or_key(trained, tmp_path, capsys):
    found, *texts = read(capsys, trained / "private", tmp_path)
    summary = json.loads((trained / "private" / "summary.json").read_text())
    slack = summary["slack"]["epsilon"]
    assert 0 < slack < 1e-6
    assert summary["epsilon"] + slack <= found["epsilon"] < summary["epsilon"] + 1e-4
    assert summary["params_sha256"] in found["claim"]
    secret = json.loads((trained / "private" / "secret.json").read_text())["secret"]
    for text in texts:
        assert found["claim"] in text and "does not cover" in text
        assert str(trained) not in text and "texts.parquet" not in text and secret not in text


def test_no_noise_makes_no_claim(trained, tmp_path, capsys):
    found, _, page = read(capsys, trained / "open", tmp_path)
    assert found["epsilon"] == "inf" and "no privacy is claimed for anyone" in found["claim"]
    assert "<img" not in page


def test_a_seeded_run_makes_no_claim(trained, tmp_path, capsys):
    found, text, _ = read(capsys, trained / "seeded", tmp_path)
    label = f"no guarantee: {Fact.KNOWN_SEED.text}"
    assert "no privacy is claimed" in found["claim"] and label in found["claim"]
    assert found["epsilon_holds"] == "known-seed" and found["guarantee"] is False
    assert text.count(label) >= 3 and "recognises" not in text
    main(["verify", str(trained / "seeded"), "--json"])
    verified = json.loads(capsys.readouterr().out)
    assert verified["holds"] is True and verified["guarantee"] is False


def test_the_claim_says_what_is_taken_as_known(trained, tmp_path, capsys):
    found, _, _ = read(capsys, trained / "els", tmp_path)
    plan = json.loads((trained / "els" / "config.json").read_text())["plan"]
    assert plan["num_units"] == plan["num_users"] * plan["group_size"]
    some = f"on at most {plan['group_size']} texts of each of {plan['num_users']} users"
    known = "taking as known that they are among the users, and how many users there are"
    assert some in found["claim"] and known in found["claim"]
    assert plan["num_examples"] is None
    found, text, _ = read(capsys, trained / "removed", tmp_path)
    plan = json.loads((trained / "removed" / "config.json").read_text())["plan"]
    assert plan["num_units"] < plan["num_examples"]
    assert f"on {plan['num_units']} of the {plan['num_examples']} texts" in found["claim"]
    assert "taking as known how many users and texts there are" in found["claim"]
    assert "public by assumption: how many users and examples there are" in text


def without_model(run_dir):
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "summary.json").unlink()


@pytest.mark.parametrize(
    "says, damage",
    [
        ("summary violated", lambda run: edit_json(run / "summary.json", epsilon=0.1)),
        ("draws violated", lambda run: edit_lines(run / "metrics.jsonl", another_cohort)),
        ("key violated", lambda run: (run / "secret.json").chmod(0o644)),
        (" has no checkpoint", without_model),
    ],
)
def test_a_run_that_is_not_what_it_says_gets_no_report(
    says, damage, trained, run_dir, tmp_path, capsys
):
    shutil.copytree(trained / "private", run_dir)
    damage(run_dir)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(run_dir), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 1 and "nothing to report: " in error and says in error
    assert not (tmp_path / "out").exists()


def test_a_model_card_claims_what_the_report_does(trained, tmp_path, capsys):
    found, *_ = read(capsys, trained / "private", tmp_path)
    card, reason = model_card(trained / "private", Console())
    assert reason is None
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["text-generation", "differential-privacy"],
    }
    assert found["claim"] in body and "| adjacency |" in body


@pytest.mark.parametrize("name", ["seeded", "open", "damaged"])
def test_the_card_of_a_model_that_claims_nothing_says_so(name, trained, run_dir, capsys):
    shutil.copytree(trained / ("private" if name == "damaged" else name), run_dir)
    if name == "damaged":
        edit_json(run_dir / "summary.json", epsilon=0.1)
    card, reason = model_card(run_dir, Console())
    with pytest.raises(SystemExit) as stop:
        main(["export", str(run_dir), "--out", str(run_dir / "out")])
    assert stop.value.code == 1 and (run_dir / "out" / "model.safetensors").exists()
    assert reason and " ".join(reason.split()) in " ".join(capsys.readouterr().err.split())
    assert "no privacy is claimed" in card.lower() and "differential-privacy" not in card
    assert ("the run breaks the promise summary" in card) == (name == "damaged")
