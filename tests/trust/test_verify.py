"""What `fedsim verify` finds: nothing in a run as it is, and every promise that was broken."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import model_files
from jsonschema import Draft202012Validator

from docs.schemas import schemas
from fedsim import trust
from fedsim.cli.main import main
from fedsim.errors import FedsimError
from fedsim.files import sha256_of
from fedsim.run import Console, checkpoint, directory, ledger
from fedsim.run.ledger import LINK, link

NUM_STEPS = 6
FLAGS = {"epsilon": 4, "num-steps": NUM_STEPS, "batch_size": 12, "group-size": 2, "max-length": 24}
FLAGS |= {"model": "micro", "engine": "local", "strategy": "scan", "rows_per_pass": 2}
FLAGS |= {"checkpoint-every": 2, "eval-every": 3}


def write_texts(path, num_users=40):
    rng = np.random.default_rng(0)
    users = [f"user{u}" for u in range(num_users) for _ in range(rng.integers(1, 6))]
    texts = [" ".join(rng.choice(["red", "green", "blue", "grey"], 4)) for _ in users]
    pq.write_table(pa.table({"user_id": users, "text": texts}), path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "texts.parquet")


def command(texts, run_dir, algorithm="uls", **flags):
    flags = {"data": texts, "run-dir": run_dir, **FLAGS, **flags}
    words = [str(x) for n, value in flags.items() if value is not None for x in (f"--{n}", value)]
    return ["train", algorithm, *words]


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """Directories of finished runs, by algorithm; not to be changed."""
    directory = tmp_path_factory.mktemp("trained")
    for algorithm in ("els", "uls"):
        main(command(texts, directory / algorithm, algorithm, ema=0.5))
    return {algorithm: directory / algorithm for algorithm in ("els", "uls")}


@pytest.fixture
def copy(trained, run_dir):
    """A copy of the run of uls."""
    shutil.copytree(trained["uls"], run_dir)
    return run_dir


def verify(capsys, run_dir, *args):
    """(exit code, {promise: (holds, found)}); promises are kept or broken as the code says."""
    capsys.readouterr()
    try:
        main(["verify", str(run_dir), *map(str, args), "--json"])
        code = 0
    except SystemExit as stop:
        code = stop.code
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] == (code != 1)
    unseen = any(check["holds"] is None for check in found["checks"])
    assert found["guarantee"] is (False if code == 1 else None if unseen else True)
    return code, {each["promise"]: (each["holds"], each["found"]) for each in found["checks"]}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_a_run_keeps_its_promises_and_gives_the_same_bits_again(algorithm, trained, capsys):
    before = {p: p.read_bytes() for p in trained[algorithm].rglob("*") if p.is_file()}
    for flag, says in (("--replay", "the last 2 of 6 steps (from"), ("--whole", "all 6 steps (")):
        code, found = verify(capsys, trained[algorithm], flag)
        assert code == 0 and {holds for holds, _ in found.values()} == {True}, found
        assert found["replay"][1].startswith(says)
    assert f"({NUM_STEPS} of {NUM_STEPS} steps)" in found["draws"][1]
    assert {p: p.read_bytes() for p in trained[algorithm].rglob("*") if p.is_file()} == before


@pytest.mark.privacy
def test_a_run_on_data_without_unknown_rows_claims_what_it_promised(tmp_path, run_dir, capsys):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [{"user_id": f"user{u}", "messages": chat} for u in range(60)]
    rows[7]["messages"] = [{"role": "critic", "content": "?"}]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build = ["--tokenizer", model_files(tmp_path / "files"), "--out", tmp_path / "built"]
    main(["data", "build", str(data), "--skip-unknown", *map(str, build)])
    main(command(tmp_path / "built", run_dir, **{"max-length": None, "num-steps": 2}))
    code, found = verify(capsys, run_dir)
    assert code == 0 and "(skip_unknown)" in found["outside"][1]
    main(["export", str(run_dir), "--out", str(tmp_path / "model")])
    card = (tmp_path / "model" / "README.md").read_text()
    assert "epsilon = 4.0000" in card and "(skip_unknown)" in card


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=2) + "\n")


def edit_lines(path, change):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(lines)))


def rewrite_ledger(run_dir, change):
    """What a forger would do: another ledger whose chain fits, and a summary that knows of it."""
    lines = [{k: v for k, v in line.items() if k != "chain"} for line in ledger.read(run_dir)]
    chain, whole = "", b""
    for line in change(lines):
        body = json.dumps(line).encode()[:-1]
        chain = link(chain, body)
        whole += body + LINK.format(chain).encode() + b"\n"
    (run_dir / ledger.FILE).write_bytes(whole)
    edit_json(run_dir / "summary.json", ledger_chain=chain)


def more_noise(lines):
    for line in ledger.steps_of(lines):
        line["event"]["noise_multiplier"] *= 2
    return lines


def with_line(number, **fields):
    """A change of lines: one has other values."""
    return lambda lines: [line | fields if line is lines[number] else line for line in lines]


def another_plan(lines):
    lines[0]["head"]["plan"]["delta"] = 1e-3
    return lines


def put_in(where, after=None, nonce="0" * 32):
    """Another segment, at an index; None: with the nonce of the first one."""

    def change(lines):
        own = {"first": where, "after": where if after is None else after}
        own |= {"nonce": nonce} if nonce else {}
        return [*lines[: 2 + where], {"segment": lines[1]["segment"] | own}, *lines[2 + where :]]

    return change


def with_epsilon(value, key="epsilon"):
    """A change of lines: what is said to be spent after every step is another number."""
    return lambda lines: [{**line, key: value} if line.get(key) else line for line in lines]


def another_cohort(lines):
    name = "non_private/cohort_size"
    return [{**line, name: 1 + line[name]} if name in line else line for line in lines]


def other_params(run_dir, of="params"):
    """A checkpoint of something else, whole in itself, and a summary that knows of it."""
    path = checkpoint.latest(run_dir)
    state = checkpoint.load(path)
    state[of]["embed"]["embedding"] = state[of]["embed"]["embedding"] + 1
    checkpoint.write(run_dir, NUM_STEPS, state)
    digest = checkpoint.params_sha256(checkpoint.load_params(path))
    edit_json(run_dir / "summary.json", params_sha256=digest)


def unproven_strategy(run_dir):
    """Settings of a strategy without a bound, of which the plan says nothing."""
    edit_json(run_dir / "config.json", strategy="vmap:8")

    def other_settings(lines):
        lines[0]["head"]["config_sha256"] = sha256_of(run_dir / directory.CONFIG)
        return lines

    rewrite_ledger(run_dir, other_settings)


LEDGER = {  # forged ledgers
    "cut": ("summary", lambda lines: lines[:-1]),
    "of more noise": ("events", more_noise),
    "of another sampling": ("events", with_line(4, sampling_run="cyclic")),
    "of another plan": ("ledger", another_plan),
    "with an index twice": ("ledger", lambda lines: [*lines[:4], lines[3], *lines[4:]]),
    "with a nonce twice": ("ledger", put_in(NUM_STEPS, nonce=None)),
    "with a segment of a later checkpoint": ("ledger", put_in(4, 5)),
    "with lost steps that a checkpoint has": ("checkpoints", put_in(NUM_STEPS, 5)),
    "with another epsilon": ("epsilon", with_epsilon(0.01)),
    "with other bits": ("replay", with_line(-1, gradient_sha256="0" * 64)),
}
METRICS = {
    "another epsilon": ("metrics", with_epsilon(0.01, "privacy/epsilon")),
    "a step too many": ("metrics", lambda lines: [*lines, {**lines[-1], "step": NUM_STEPS + 1}]),
    "other draws": ("draws", another_cohort),
}
SUMMARY = {"final_eval_loss": 0.1, "initial_eval_loss": 9.9, "outside": "nothing"}
SUMMARY |= {"non_private": ["a fact"], "privacy_unit": "example", "gradient_noise_multiplier": 9.0}
SUMMARY |= {"final_clip_norm": 0.5, "epsilon": 0.5, "adjacency": "replace one", "delta": 1e-9}
SUMMARY |= {"steps_done": NUM_STEPS - 1, "params_sha256": "0" * 64}
OTHERS = {
    "a strategy without a bound": ("settings", unproven_strategy),
    "no checkpoints": ("checkpoints", lambda r: shutil.rmtree(r / "checkpoints")),
    "a checkpoint under another name": (
        "checkpoints",
        lambda r: checkpoint.latest(r).rename(r / "checkpoints" / "step-00000005.safetensors"),
    ),
    "no ledger": ("ledger", lambda r: (r / "ledger.jsonl").unlink()),
    "a key that others can read": ("key", lambda r: (r / "secret.json").chmod(0o644)),
    "a directory that others can read": ("key", lambda r: r.chmod(0o755)),
    "another key": ("key", lambda r: edit_json(r / "secret.json", secret="00" * 32)),
    "parameters that were not trained so": ("replay", other_params),
    "an average of other parameters": ("replay", lambda r: other_params(r, "average")),
}


BROKEN = {
    **{
        f"a ledger {what}": (promise, lambda run, c=change: rewrite_ledger(run, c))
        for what, (promise, change) in LEDGER.items()
    },
    **{
        f"metrics: {what}": (promise, lambda run, c=change: edit_lines(run / "metrics.jsonl", c))
        for what, (promise, change) in METRICS.items()
    },
    **{
        f"summary: {name}": ("summary", lambda run, c=c: edit_json(run / "summary.json", **c))
        for name, c in ((name, {name: value}) for name, value in SUMMARY.items())
    },
    **OTHERS,
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_named(what, copy, capsys):
    promise, damage = BROKEN[what]
    damage(copy)
    code, found = verify(capsys, copy, *(["--replay"] if promise == "replay" else []))
    assert code == 1 and found[promise][0] is False, found


RUN = ["config.json", "tokenizer.json", "ledger.jsonl", "summary.json", "secret.json"]
RUN += [f"checkpoints/step-{NUM_STEPS:08}.safetensors"]
STORM = pytest.param(40, marks=[pytest.mark.slow, pytest.mark.privacy])


@pytest.mark.parametrize("number", [2, STORM])
@pytest.mark.parametrize("name", RUN)
def test_a_bit_that_flips_in_any_file_is_noticed(name, number, copy):
    def broken():
        try:
            checks = trust.verify(copy, console=Console())
        except FedsimError:
            return True
        return any(check.holds is False for check in checks)

    whole, rng = (copy / name).read_bytes(), np.random.default_rng(len(name))
    for place in [0, 8 * len(whole) - 1, *rng.integers(0, 8 * len(whole), number - 2).tolist()]:
        at, bit = divmod(place, 8)
        (copy / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        assert broken(), (at, bit)
    (copy / name).write_bytes(whole)
    assert not broken()


def test_the_published_schemas_describe_a_run(trained):
    run_dir = trained["uls"]
    valid = {name: Draft202012Validator(schema) for name, schema in schemas().items()}
    valid["plan"].validate(json.loads((run_dir / "config.json").read_text())["plan"])
    lines = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert len(lines) == 2 + NUM_STEPS
    for line in lines:
        valid["ledger"].validate(line)
    summary = json.loads((run_dir / "summary.json").read_text())
    valid["summary"].validate(summary)
    for name in ("epsilon", "steps_done", "sampling_prob", "delta"):
        assert not valid["summary"].is_valid({**summary, name: None})


def test_changed_settings_and_other_data_are_named(copy, tmp_path, capsys):
    code, found = verify(capsys, copy, "--data", write_texts(tmp_path / "other.parquet", 39))
    assert code == 1 and found["data"][0] is False and "other data" in found["data"][1]
    assert found["draws"] == (None, "needs the data that the run was started with")
    path = copy / "config.json"
    path.write_text(path.read_text().replace('"optimizer": "momentum"', '"optimizer": "sgd"'))
    code, found = verify(capsys, copy)
    says = f"{path}: was changed since the run was started"
    assert code == 1 and found == {"settings": (False, says)}


UNSEEN = {"metrics.jsonl": {"metrics", "draws"}, "summary.json": {"summary"}}
UNSEEN |= {"secret.json": {"key", "data", "outside", "draws"}}


@pytest.mark.parametrize("file, unknown", UNSEEN.items())
def test_what_cannot_be_checked_is_no_broken_promise(file, unknown, copy, capsys):
    (copy / file).unlink()
    code, found = verify(capsys, copy)
    assert {promise for promise, (holds, _) in found.items() if holds is None} == unknown
    assert code == 0 and False not in {holds for holds, _ in found.values()}


@pytest.mark.parametrize("name", ["verify", "report"])
def test_a_run_that_is_going_on_is_not_looked_at(name, copy, capsys):
    with directory.lock(copy), pytest.raises(SystemExit) as stop:
        main([name, str(copy)])
    assert stop.value.code == 2
    assert "expected a run that no other process is working on" in capsys.readouterr().err
    with directory.lock(copy, to_read=True):
        main(["verify", str(copy)])
    assert "\nNo promise is broken; --whole computes every step again" in capsys.readouterr().out


def test_what_is_no_run_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # as an export has
    (near := tmp_path / "runs").mkdir()
    (near / "ledger.jsonl").touch()
    also = "`fedsim verify` takes a published folder, too, but not an exported model: it cannot"
    exists = f"expected a directory that exists, such as {near}\n"
    for command, place, expected in [("verify", tmp_path, also), ("report", f"{near}s", exists)]:
        with pytest.raises(SystemExit) as stop:
            main([command, str(place)])
        assert stop.value.code == 2 and expected in capsys.readouterr().err
