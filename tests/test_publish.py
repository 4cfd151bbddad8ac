"""What is published of a run: exactly what may be, whatever a user's texts say."""

import json
import re
import shutil
from dataclasses import replace
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from flax.traverse_util import flatten_dict
from jsonschema import Draft202012Validator
from pretrained_models import make_model
from safetensors.numpy import load_file, save_file
from test_verify import command, edit_json, verify, write_texts

from docs.schemas import schemas
from fedsim.cli.main import main
from fedsim.keys import SecretKey
from fedsim.plan import Caveat, Fact, NoisePlan
from fedsim.run import Console, find_model
from fedsim.trust import Check, published
from fedsim.trust.report import publish

pytestmark = pytest.mark.slow

OF_MODEL = ("config.json", "model.safetensors", "README.md", "generation_config.json")
OF_MODEL += ("tokenizer.json", "tokenizer_config.json")
ALL = {"ledger.jsonl", "report.html", "report.md", *(f"model/{name}" for name in OF_MODEL)}


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


def refused(words, capsys):
    """The error of a command that ends with exit code 1 or 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code in (1, 2)
    return capsys.readouterr().err


def test_a_folder_has_what_may_be_published_and_nothing_else(folder, trained):
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == ALL | {"published.json"}
    record = json.loads((folder / "published.json").read_text())
    Draft202012Validator(schemas()["published"]).validate(record)
    assert record["files"].keys() == ALL
    assert (folder / "ledger.jsonl").read_bytes() == (trained / "private/ledger.jsonl").read_bytes()
    summary = json.loads((trained / "private/summary.json").read_text())
    assert record["params_sha256"] == summary["params_sha256"]
    assert summary["epsilon"] < record["epsilon"] < summary["epsilon"] + 1e-4
    for name in files:
        text = (folder / name).read_text(errors="replace")
        assert "_eval_loss" not in text and str(trained) not in text, name
        assert "texts.parquet" not in text and "secret.json:" not in text, name


def test_a_stranger_verifies_it_as_far_as_can_be(folder, tmp_path, capsys):
    elsewhere = shutil.copytree(folder, tmp_path / "downloaded")
    code, found = verify(capsys, elsewhere)
    expected = dict.fromkeys("files ledger plan events epsilon model claim".split(), True)
    expected |= dict.fromkeys("settings key budget data draws replay".split())
    assert code == 0 and {promise: holds for promise, (holds, _) in found.items()} == expected
    assert "directory of a run" in refused(["verify", elsewhere, "--replay"], capsys)


@pytest.mark.parametrize("name", sorted(ALL | {"published.json"}))
def test_a_changed_byte_is_found_and_its_file_named(name, folder, tmp_path, capsys):
    changed = shutil.copytree(folder, tmp_path / "changed") / name
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data)
    code, found = verify(capsys, tmp_path / "changed")
    assert code == 1 and name in " ".join(says for holds, says in found.values() if not holds)


def other_weights(name="", file="model/model"):
    def damage(folder):
        weights = folder / f"{file}.safetensors"
        tensors = load_file(weights)
        tensors[name or min(tensors)].flat[0] += 1
        save_file(tensors, weights, {"format": "pt"})

    return damage


def adapters_of_a_fresh_model(folder):
    params = published.without_zeros(find_model(str(folder / "model")).params)
    save_file(flatten_dict(params, sep="/"), folder / published.ADAPTERS)
    edit_json(folder / published.NAME, scale=1.0)
    other_weights()(folder)


def without_steps(left, said):
    def damage(folder):
        lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
        (folder / "ledger.jsonl").write_bytes(b"".join(lines[: 2 + left]))
        edit_json(folder / "published.json", num_steps=said)

    return damage


DAMAGES = {
    "another file": ("files", lambda folder: (folder / "secret.json").write_text("")),
    "another file of a model": ("files", lambda folder: (folder / "model/a.log").write_text("")),
    "a link": ("files", lambda folder: (folder / "a").symlink_to(folder / "ledger.jsonl")),
    "no report": ("files", lambda folder: (folder / "report.md").unlink()),
    "a smaller epsilon": ("claim", lambda folder: edit_json(folder / published.NAME, epsilon=2.0)),
    "another card": ("claim", lambda folder: (folder / "model/README.md").write_text("epsilon 1")),
    "no steps": ("ledger", without_steps(0, 2)),
    "fewer steps": ("ledger", without_steps(1, 2)),
    "no steps, as it says": ("ledger", without_steps(0, 0)),
    "another weight": ("model", other_weights("transformer.h.0.attn.c_proj.weight")),
    "adapters": ("model", adapters_of_a_fresh_model),
    "another bias": ("model", other_weights("transformer.h.0.attn.c_proj.bias")),
}


@pytest.mark.privacy
@pytest.mark.parametrize("what", DAMAGES)
def test_what_a_forger_changes_is_found(what, folder, tmp_path, capsys):
    """Also where every digest fits, and in the biases that the format adds."""
    promise, damage = DAMAGES[what]
    forged = shutil.copytree(folder, tmp_path / "forged")
    damage(forged)
    if promise != "files":
        edit_json(forged / "published.json", files=published.digests(forged))
    code, found = verify(capsys, forged)
    assert code == 1 and found[promise][0] is False, found
    assert promise == "files" or found["files"][0] is True


@pytest.mark.privacy
def test_a_plan_that_contradicts_itself_or_the_model_is_found(folder, monkeypatch):
    plan = published.plan_in(folder)
    rare = replace(plan.sampling, prob=plan.expected_count / 380)
    for says, changes in {
        "VIOLATED num_units=380: expected <= 38": {"num_units": 380, "sampling": rare},
        "VIOLATED noise of 2 bands: not 1": {"noise": NoisePlan("correlated", 2)},
        "numbers: expected 1, as planned": {"num_parameters": 1},
        "the event of my:Own": {"non_private": (Caveat(Fact.OWN_ALGORITHM, "my:Own"),)},
    }.items():
        monkeypatch.setattr(published, "plan_in", lambda path, new=changes: replace(plan, **new))
        assert says in "; ".join(f"{x.verdict} {x.found}" for x in published.check_folder(folder))


def test_what_must_not_be_published_is_refused(trained, tmp_path, capsys):
    unfinished = shutil.copytree(trained / "private", tmp_path / "run")
    (unfinished / "summary.json").unlink()
    (tmp_path / "there").mkdir()
    for run, out, says in (
        (trained / "seeded", "out", "expected a run with a guarantee, and not one with a known se"),
        (trained / "open", "out", "expected a run with a guarantee, and not one with no noise"),
        (unfinished, "out", "expected a run that has ended"),
        (trained / "private", "there", "not there yet"),
    ):
        assert says in refused(["publish", run, tmp_path / out], capsys)
    assert not (tmp_path / "out").exists()


def test_nothing_is_there_unless_all_of_it_is(trained, tmp_path, capsys, monkeypatch):
    run, out = trained / "private", tmp_path / "out"
    broken = [Check("files", False, "a file is missing")]
    with monkeypatch.context() as planted:
        planted.setattr(published, "check_folder", lambda path: broken)
        assert "a file is missing" in refused(["publish", run, out], capsys)
    monkeypatch.setitem(publish.__globals__, "write_report", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        publish(run, out, Console())
    assert not list(tmp_path.iterdir())


@pytest.mark.privacy
def test_a_pretrained_model_and_its_adapters(trained, tmp_path, capsys, monkeypatch):
    """The model has the fingerprint of the claim, or is its base with adapters merged that have it.
    Its settings name no place of this machine."""
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
        code, found = verify(capsys, out)
        assert code == 0 and found["model"][0] is holds, name
    assert verify(capsys, out, "--model", model)[1]["model"][0] is True
    for file in ("adapters", "model/model"):
        forged = shutil.copytree(out, tmp_path / "forged", dirs_exist_ok=True)
        other_weights(file=file)(forged)
        edit_json(forged / "published.json", files=published.digests(forged))
        code, found = verify(capsys, forged, "--model", model)
        assert code == 1 and found["files"][0] and found["model"][0] is False, found


FEW = ["red"]
MANY = ["Blau, grün: " * 9, "Красный и серый", "灰色的和红色的", "red green blue", "grey"] * 18
DRAWN = {"algorithm": "els", "group-size": None, "strategy": "auto"}
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
    names = record.pop("files")
    head, *_, last = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    content = {"published.json": json.dumps(record)}
    for name in names:
        data = (folder / name).read_bytes()
        if name.endswith(".safetensors"):  # names, types and shapes; the rest is noisy
            data = data[8 : 8 + int.from_bytes(data[:8], "little")]
        content[name] = data.decode()
    # The digest of the settings is of a file with a seal that is in no other one; see below.
    for noisy in (record["params_sha256"], last["chain"], head["head"]["config_sha256"]):
        content = {name: text.replace(noisy, "") for name, text in content.items()}
    return {name: NOISY.sub("", text) for name, text in content.items()}


@pytest.mark.privacy
def test_the_digest_of_the_settings_confirms_no_guess_of_them(trained, folder):
    """It is in the ledger, and the file says what follows from data: names of tables, times."""
    text = (trained / "private" / "config.json").read_text()
    head = json.loads((folder / "ledger.jsonl").read_text().splitlines()[0])["head"]
    assert head["config_sha256"] == sha256(text.encode()).hexdigest()
    shown = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    unknown = json.loads(text)["blind"]
    assert head["config_sha256"].encode() in shown and unknown.encode() not in shown
    assert unknown == SecretKey.load(trained / "private").seal("config.json")


@pytest.mark.privacy
@pytest.mark.parametrize("flags", [{"algorithm": "uls"}, {"algorithm": "els"}, DRAWN], ids=str)
def test_no_byte_before_the_first_noisy_number_tells_of_one_users_texts(
    flags, tmp_path, monkeypatch
):
    few, many = (
        before_the_noise(published_with(theirs, tmp_path / name, monkeypatch, **flags))
        for name, theirs in (("few", FEW), ("many", MANY))
    )
    assert few == many
