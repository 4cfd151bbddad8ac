"""What is published of a run: exactly what may be, whatever a user's texts say."""

import json
import re
import shutil
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator
from pretrained_models import make_model
from safetensors.numpy import load_file, save_file
from test_verify import command, write_texts

from docs.schemas import schemas
from fedsim.cli.main import main
from fedsim.keys import SecretKey
from fedsim.run.console import Console
from fedsim.trust import Check, published
from fedsim.trust.report import publish

pytestmark = [pytest.mark.slow, pytest.mark.ci]

OF_MODEL = {f"model/{name}" for name in ("config.json", "model.safetensors", "README.md")}
OF_MODEL |= {"model/tokenizer.json", "model/tokenizer_config.json"}
OF_MODEL |= {"model/generation_config.json"}
ALL = {"ledger.jsonl", "report.html", "report.md", *OF_MODEL}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Directories of finished runs by name; not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    texts = write_texts(directory / "texts.parquet")
    flags = {"private": {}, "seeded": {"seed": 3}, "open": {"epsilon": "inf"}}
    for name, changed in flags.items():
        main(command(texts, directory / name, **{"num-steps": 2, "eval-every": 1, **changed}))
    return directory


@pytest.fixture(scope="module")
def folder(trained):
    """The published folder of a run, where it is by default; not to be changed."""
    main(["publish", str(trained / "private")])
    return trained / "private" / "public"


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def verified(folder, capsys):
    """(exit code, result) of `fedsim verify`."""
    capsys.readouterr()
    try:
        main(["verify", str(folder), "--json"])
        code = 0
    except SystemExit as stop:
        code = stop.code
    return code, json.loads(capsys.readouterr().out)


def refused(words, capsys):
    """The error of a command that ends with exit code 1 or 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code in (1, 2)
    return capsys.readouterr().err


def test_a_folder_has_what_may_be_published_and_nothing_else(folder, trained):
    assert files_of(folder) == ALL | {"published.json"}
    record = json.loads((folder / "published.json").read_text())
    Draft202012Validator(schemas()["published"]).validate(record)
    assert record["files"].keys() == ALL
    run = trained / "private"
    assert (folder / "ledger.jsonl").read_bytes() == (run / "ledger.jsonl").read_bytes()
    summary = json.loads((run / "summary.json").read_text())
    assert record["params_sha256"] == summary["params_sha256"]
    assert summary["epsilon"] < record["epsilon"] < summary["epsilon"] + 1e-4
    for path in folder.rglob("*"):
        text = path.read_text(errors="replace") if path.is_file() else ""
        assert "_eval_loss" not in text and str(trained) not in text, path
        assert "texts.parquet" not in text and "secret.json:" not in text, path


def test_a_stranger_verifies_it_as_far_as_can_be(folder, tmp_path, capsys):
    elsewhere = shutil.copytree(folder, tmp_path / "downloaded")
    code, result = verified(elsewhere, capsys)
    found = {check["promise"]: check["holds"] for check in result["checks"]}
    (claim,) = (check["found"] for check in result["checks"] if check["promise"] == "claim")
    assert claim.endswith("what else it says was not compared")
    held = ("files", "ledger", "plan", "events", "epsilon", "model", "claim")
    away = ("settings", "key", "budget", "data", "draws", "replay")
    assert found == dict.fromkeys(held, True) | dict.fromkeys(away)
    assert code == 0 and result["holds"] and result["guarantee"] is None
    assert "directory of a run" in refused(["verify", elsewhere, "--replay"], capsys)


@pytest.mark.parametrize("name", sorted(ALL | {"published.json"}))
def test_a_changed_byte_is_found_and_its_file_named(name, folder, tmp_path, capsys):
    changed = shutil.copytree(folder, tmp_path / "changed") / name
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    code, result = verified(tmp_path / "changed", capsys)
    assert code == 1 and name in " ".join(c["found"] for c in result["checks"] if not c["holds"])


def test_a_report_that_is_missing_or_no_text_is_found(folder, tmp_path, capsys):
    changed = shutil.copytree(folder, tmp_path / "changed") / "report.md"
    changed.write_bytes(changed.read_bytes() + b"\xff")
    for _ in ("no text", "missing"):
        code, result = verified(changed.parent, capsys)
        found = {check["promise"]: check["holds"] for check in result["checks"]}
        assert code == 1 and found["files"] is False and found["claim"] is not True
        changed.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["secret.json", "metrics.jsonl", "tb/events", "model/train.log"])
def test_no_other_file_belongs_there(name, folder, tmp_path, capsys):
    more = shutil.copytree(folder, tmp_path / "more") / name
    more.parent.mkdir(exist_ok=True)
    more.write_text("")
    code, result = verified(tmp_path / "more", capsys)
    assert code == 1 and "none of the files that may be published" in result["checks"][0]["found"]
    more.unlink()
    more.symlink_to(folder / "ledger.jsonl")
    assert "a link" in verified(tmp_path / "more", capsys)[1]["checks"][0]["found"]


def test_another_claim_than_that_of_the_ledger_is_found(folder, tmp_path, capsys):
    """Also where every digest fits."""
    better = shutil.copytree(folder, tmp_path / "better")
    record = json.loads((better / "published.json").read_text())
    record["epsilon"] /= 2
    (better / "published.json").write_text(json.dumps(record))
    _, result = verified(better, capsys)
    (violated,) = [check for check in result["checks"] if check["holds"] is False]
    assert violated["promise"] == "claim" and "expected" in violated["found"]


@pytest.mark.privacy
@pytest.mark.parametrize("left", [0, 1])
def test_a_ledger_without_its_last_steps_is_found(left, folder, tmp_path, capsys):
    """Also where every digest fits, and where no step is said to be released."""
    cut = shutil.copytree(folder, tmp_path / "cut")
    lines = (cut / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "ledger.jsonl").write_bytes(b"".join(lines[: 2 + left]))
    record = json.loads((cut / "published.json").read_text())
    record["files"] = published.digests(cut)
    for said, why in ((2, "expected 2, as published.json says"), (0, "expected")):
        (cut / "published.json").write_text(json.dumps({**record, "num_steps": said}))
        code, result = verified(cut, capsys)
        found = {check["promise"]: check for check in result["checks"]}
        assert code == 1 and found["files"]["holds"] and found["ledger"]["holds"] is False
        assert f"{left} steps: {why}" in found["ledger"]["found"]


@pytest.mark.parametrize("part", ["kernel", "bias"])
def test_other_weights_of_a_fresh_model_are_found(part, folder, tmp_path, capsys):
    """Also where their digest fits, and in the biases that the format adds."""
    swapped = shutil.copytree(folder, tmp_path / "swapped")
    weights = swapped / "model" / "model.safetensors"
    tensors = load_file(weights)
    name = "transformer.h.0.attn.c_proj." + {"kernel": "weight", "bias": "bias"}[part]
    tensors[name].flat[0] += 1
    save_file(tensors, weights, {"format": "pt"})
    record = json.loads((swapped / "published.json").read_text())
    record["files"]["model/model.safetensors"] = sha256(weights.read_bytes()).hexdigest()
    (swapped / "published.json").write_text(json.dumps(record))
    code, result = verified(swapped, capsys)
    (violated,) = [check for check in result["checks"] if check["holds"] is False]
    assert code == 1 and violated["promise"] == "model" and "merged" not in violated["found"]


@pytest.mark.parametrize("name, why", [("seeded", "a known seed"), ("open", "no noise")])
def test_a_run_without_a_guarantee_is_not_published(name, why, trained, tmp_path, capsys):
    said = refused(["publish", trained / name, tmp_path / "out"], capsys)
    assert "expected a run with a guarantee" in said and why in said
    assert not list(tmp_path.iterdir())


def test_a_run_that_has_not_ended_is_not_published(trained, tmp_path, capsys):
    run = shutil.copytree(trained / "private", tmp_path / "run")
    (run / "summary.json").unlink()
    assert "expected a run that has ended" in refused(["publish", run, tmp_path / "out"], capsys)


def test_nothing_is_there_unless_all_of_it_is(trained, tmp_path, capsys, monkeypatch):
    run, out = trained / "private", tmp_path / "out"
    broken = [Check("files", False, "a file is missing")]
    with monkeypatch.context() as planted:
        planted.setattr(published, "check_folder", lambda path: broken)
        assert "a file is missing" in refused(["publish", run, out], capsys)
    with monkeypatch.context() as planted:
        planted.setitem(publish.__globals__, "write_report", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publish(run, out, Console())
    assert not list(tmp_path.iterdir())
    out.mkdir()
    assert "not there yet" in refused(["publish", run, out], capsys)


def test_a_pretrained_model_and_its_adapters(trained, tmp_path, capsys, monkeypatch):
    """The model has the fingerprint of the claim; with merged adapters it cannot. Its settings name
    no place of this machine."""
    monkeypatch.chdir(tmp_path)
    model = make_model(tmp_path)
    for name, field in (("config", "_name_or_path"), ("tokenizer_config", "tokenizer_file")):
        file = model / f"{name}.json"
        fields = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**fields, field: str(tmp_path / "model"), "kept": 1}))
    for name, rank, holds in (("whole", 0, True), ("adapted", 2, None)):
        flags = {"model": model, "lora-rank": rank, "num-steps": 1}
        main(command(trained / "texts.parquet", name, **flags))
        main(["publish", name])
        out = tmp_path / name / "public"
        assert json.loads((out / "model/tokenizer_config.json").read_text())["kept"] == 1
        for path in out.rglob("*.json*"):
            assert str(tmp_path) not in path.read_text(), path
        code, result = verified(out, capsys)
        found = {check["promise"]: check["holds"] for check in result["checks"]}
        assert code == 0 and found["model"] is holds, name


# ---- One user's texts ---------------------------------------------------------------------------

FEW = ["red"]
MANY = ["Blau, grün: " * 9, "Красный и серый", "灰色的和红色的", "red green blue", "grey"] * 18
NOISY = re.compile(r'"(gradient_sha256|chain|nonce)": "[0-9a-f]{32,64}"')


def published_with(theirs, place, monkeypatch, **flags):
    """The published folder of a run in whose data one user has these texts."""
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("FEDSIM_BUDGET_LEDGER", str(place / "ledger"))
    # The same key for both, and the same seals: a seal is a pseudorandom number to all without it.
    monkeypatch.setattr("fedsim.keys.secrets.token_bytes", lambda size: b"k" * size)
    monkeypatch.setattr(SecretKey, "seal", lambda self, text: "5ea1" * 16)
    rows = [(f"user{u}", "red green blue grey") for u in range(40) for _ in range(3 * u) if u != 7]
    users, texts = zip(*rows, *(("user7", text) for text in theirs), strict=True)
    pq.write_table(pa.table({"user_id": users, "text": texts}), "texts.parquet")
    main(command("texts.parquet", "run", **{"num-steps": 1, "eval-every": 1, **flags}))
    main(["publish", "run"])
    return place / "run" / "public"


def before_the_noise(folder):
    """The content of a published folder without the noisy numbers."""
    record = json.loads((folder / "published.json").read_text())
    known = {name: sha256 for name, sha256 in record.pop("files").items()}
    head, *_, last = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    # A digest of a file with a seal that is in no other one; see the test of what it hides.
    config = head["head"]["config_sha256"]
    content = {"published.json": json.dumps(record)}
    for name in known:
        data = (folder / name).read_bytes()
        if name.endswith(".safetensors"):  # names, types and shapes; the rest is noisy
            data = data[8 : 8 + int.from_bytes(data[:8], "little")]
        content[name] = data.decode()
    for noisy in (record["params_sha256"], last["chain"], config):
        content = {name: text.replace(noisy, "") for name, text in content.items()}
    return {name: NOISY.sub("", text) for name, text in content.items()}


def differing(tmp_path, monkeypatch, **flags):
    """(name, line of one folder, of the other) wherever one user's texts show."""
    few, many = (
        before_the_noise(published_with(theirs, tmp_path / name, monkeypatch, **flags))
        for name, theirs in (("few", FEW), ("many", MANY))
    )
    assert few.keys() == many.keys()
    return [
        (name, *lines)
        for name in few
        for lines in zip(few[name].splitlines(), many[name].splitlines(), strict=True)
        if lines[0] != lines[1]
    ]


@pytest.mark.privacy
def test_the_digest_of_the_settings_confirms_no_guess_of_them(trained):
    """It is in the ledger, and the file says what follows from data: names of tables, times."""
    run_dir = trained / "private"
    text = (run_dir / "config.json").read_text()
    head = json.loads((run_dir / "ledger.jsonl").read_text().splitlines()[0])["head"]
    assert head["config_sha256"] == sha256(text.encode()).hexdigest()
    main(["publish", str(run_dir), str(run_dir.parent / "shown")])
    files = [path for path in (run_dir.parent / "shown").rglob("*") if path.is_file()]
    shown = b"".join(path.read_bytes() for path in files)
    unknown = json.loads(text)["blind"]
    assert head["config_sha256"].encode() in shown and unknown.encode() not in shown
    assert unknown == SecretKey.load(run_dir).seal("config.json")


@pytest.mark.privacy
@pytest.mark.parametrize(
    "flags",
    [
        {"algorithm": "uls"},
        {"algorithm": "els"},
        {"algorithm": "els", "group-size": None, "strategy": "auto"},
    ],
    ids=str,
)
def test_no_byte_before_the_first_noisy_number_tells_of_one_users_texts(
    flags, tmp_path, monkeypatch
):
    assert not differing(tmp_path, monkeypatch, **flags)
