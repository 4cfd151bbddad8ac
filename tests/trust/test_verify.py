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
from fedsim.cli.main import main
from fedsim.files import sha256_of
from fedsim.run import checkpoint, directory, ledger
from fedsim.run.ledger import LINK, link

NUM_STEPS = 6


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
    flags = {
        **{
            "data": texts,
            "run-dir": run_dir,
            "epsilon": 4,
            "num-steps": NUM_STEPS,
            "batch_size": 12,
        },
        **{
            "group-size": 2,
            "max-length": 24,
            "model": "micro",
            "engine": "local",
            "checkpoint-every": 2,
        },
        **{"strategy": "scan", "rows_per_pass": 2, "eval-every": 3, **flags},
    }
    return [
        "train",
        algorithm,
        *(str(x) for n, value in flags.items() if value is not None for x in (f"--{n}", value)),
    ]


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
@pytest.mark.ci
@pytest.mark.parametrize("algorithm", ["els", "uls"])
def test_a_run_keeps_its_promises_and_gives_the_same_bits_again(algorithm, trained, capsys):
    before = {p: p.read_bytes() for p in trained[algorithm].rglob("*") if p.is_file()}
    for flag, says in (("--replay", "the last 2 of 6 steps (from"), ("--whole", "all 6 steps (")):
        code, found = verify(capsys, trained[algorithm], flag)
        assert code == 0 and {holds for holds, _ in found.values()} == {True}, found
        assert found["replay"][1].startswith(says)
    key_gives = "how many were drawn in each step is what key and segment determine"
    assert f"{key_gives} ({NUM_STEPS} of {NUM_STEPS} steps)" in found["draws"][1]
    assert {p: p.read_bytes() for p in trained[algorithm].rglob("*") if p.is_file()} == before


@pytest.mark.privacy
def test_a_run_on_data_without_unknown_rows_claims_what_it_promised(tmp_path, run_dir, capsys):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [{"user_id": f"user{u}", "messages": chat} for u in range(60)]
    rows[7] = {"user_id": "user7", "messages": [{"role": "critic", "content": "?"}]}
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = model_files(tmp_path / "files")
    build = ["data", "build", str(data), "--tokenizer", str(files), "--skip-unknown"]
    main([*build, "--out", str(tmp_path / "built")])
    main(command(tmp_path / "built", run_dir, **{"max-length": None, "num-steps": 2}))
    code, found = verify(capsys, run_dir)
    assert code == 0 and "(skip_unknown)" in found["outside"][1]
    main(["export", str(run_dir), "--out", str(tmp_path / "model")])
    card = (tmp_path / "model" / "README.md").read_text()
    assert "epsilon = 4.0000" in card
    assert "(skip_unknown)" in card


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


def other_gradient(lines):
    lines[-1]["gradient_sha256"] = "0" * 64
    return lines


def one_as_cyclic(lines):
    lines[4]["sampling_run"] = "cyclic"
    return lines


def put_in(where, after=None, nonce="0" * 32):
    """Another segment, at an index; None: with the nonce of the first one."""

    def change(lines):
        of = dict(lines[1]["segment"]) | {
            "first": where,
            "after": where if after is None else after,
        }
        of |= {"nonce": nonce} if nonce else {}
        return [*lines[: 2 + where], {"segment": of}, *lines[2 + where :]]

    return lambda run_dir: rewrite_ledger(run_dir, change)


def another_plan(lines):
    lines[0]["head"]["plan"]["delta"] = 1e-3
    return lines


def summary(**changes):
    return lambda run_dir: edit_json(run_dir / "summary.json", **changes)


def metrics(change):
    return lambda run_dir: edit_lines(run_dir / "metrics.jsonl", change)


def with_epsilon(value, key="epsilon"):
    """A change of lines: what is said to be spent after every step is another number."""
    return lambda lines: [{**line, key: value} if line.get(key) else line for line in lines]


def another_cohort(lines):
    return [
        {**line, "non_private/cohort_size": 1 + line["non_private/cohort_size"]}
        if "non_private/cohort_size" in line
        else line
        for line in lines
    ]


def other_params(run_dir):
    """A checkpoint of something else, whole in itself, and a summary that knows of it."""
    path = checkpoint.latest(run_dir)
    state = checkpoint.load(path)
    state["params"]["embed"]["embedding"] = state["params"]["embed"]["embedding"] + 1
    checkpoint.save(run_dir, NUM_STEPS, state)
    digest = checkpoint.params_sha256(checkpoint.load_params(path))
    edit_json(run_dir / "summary.json", params_sha256=digest)


def other_average(run_dir):
    """The same, of what is released in the place of the last parameters."""
    state = checkpoint.load(checkpoint.latest(run_dir))
    state["average"]["embed"]["embedding"] = state["average"]["embed"]["embedding"] + 1
    checkpoint.save(run_dir, NUM_STEPS, state)
    digest = checkpoint.params_sha256(state["average"])
    edit_json(run_dir / "summary.json", params_sha256=digest)


def unproven_strategy(run_dir):
    """Settings of a strategy without a bound, of which the plan says nothing."""
    edit_json(run_dir / "config.json", strategy="vmap:8")

    def other_settings(lines):
        lines[0]["head"]["config_sha256"] = sha256_of(run_dir / directory.CONFIG)
        return lines

    rewrite_ledger(run_dir, other_settings)


BROKEN = {
    "a strategy without a bound": ("settings", unproven_strategy),
    "ledger cut": ("summary", lambda r: rewrite_ledger(r, lambda lines: lines[:-1])),
    "ledger of more noise": ("events", lambda r: rewrite_ledger(r, more_noise)),
    "ledger of another sampling": ("events", lambda r: rewrite_ledger(r, one_as_cyclic)),
    "ledger of another plan": ("ledger", lambda r: rewrite_ledger(r, another_plan)),
    "an index twice": ("ledger", lambda r: rewrite_ledger(r, lambda x: [*x[:4], x[3], *x[4:]])),
    "a nonce twice": ("ledger", put_in(NUM_STEPS, nonce=None)),
    "a segment of a later checkpoint": ("ledger", put_in(4, 5)),
    "steps that were lost, and are in a checkpoint": ("checkpoints", put_in(NUM_STEPS, 5)),
    "epsilon in the ledger's lines": (
        "epsilon",
        lambda r: rewrite_ledger(r, with_epsilon(0.01)),
    ),
    "epsilon in the metrics": ("metrics", metrics(with_epsilon(0.01, "privacy/epsilon"))),
    "epsilon under another name": (
        "metrics",
        metrics(lambda lines: [*lines, {"step": 1, "privacy/epsilon_of_another_accountant": 1}]),
    ),
    "a better loss": ("summary", summary(final_eval_loss=0.1)),
    "a better loss before": ("summary", summary(initial_eval_loss=9.9)),
    "something left out": ("summary", summary(outside="nothing")),
    "something more": ("summary", summary(non_private=["a fact"])),
    "another unit of privacy": ("summary", summary(privacy_unit="example")),
    "more noise claimed": ("summary", summary(gradient_noise_multiplier=9.0)),
    "another clip norm at the end": ("summary", summary(final_clip_norm=0.5)),
    "no checkpoints": ("checkpoints", lambda r: shutil.rmtree(r / "checkpoints")),
    "a step of other bits": ("replay", lambda r: rewrite_ledger(r, other_gradient)),
    "no ledger": ("ledger", lambda r: (r / "ledger.jsonl").unlink()),
    "a smaller epsilon": ("summary", summary(epsilon=0.5)),
    "another adjacency": ("summary", summary(adjacency="replace one")),
    "another delta": ("summary", summary(delta=1e-9)),
    "fewer steps": ("summary", summary(steps_done=NUM_STEPS - 1)),
    "other parameters claimed": ("summary", summary(params_sha256="0" * 64)),
    "steps that are not in the ledger": (
        "metrics",
        metrics(lambda lines: [*lines, {**lines[-1], "step": NUM_STEPS + 1}]),
    ),
    "other draws": ("draws", metrics(another_cohort)),
    "a key that others can read": ("key", lambda r: (r / "secret.json").chmod(0o644)),
    "a directory that others can read": ("key", lambda r: r.chmod(0o755)),
    "another key": (
        "key",
        lambda r: edit_json(r / "secret.json", secret="00" * 32),
    ),
    "parameters that were not trained so": ("replay", other_params),
    "an average of other parameters": ("replay", other_average),
    "a checkpoint under another name": (
        "checkpoints",
        lambda r: checkpoint.latest(r).rename(r / "checkpoints" / "step-00000005.safetensors"),
    ),
}


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


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_named(what, copy, capsys):
    promise, damage = BROKEN[what]
    damage(copy)
    code, found = verify(capsys, copy, *(["--replay"] if promise == "replay" else []))
    assert code == 1 and found[promise][0] is False, found


def test_changed_settings_are_named(copy, capsys):
    path = copy / "config.json"
    path.write_text(path.read_text().replace('"optimizer": "momentum"', '"optimizer": "sgd"'))
    code, found = verify(capsys, copy)
    says = f"{path}: was changed since the run was started"
    assert code == 1 and found == {"settings": (False, says)}


def test_other_data_are_named(copy, tmp_path, capsys):
    code, found = verify(capsys, copy, "--data", write_texts(tmp_path / "other.parquet", 39))
    assert code == 1 and found["data"][0] is False and "other data" in found["data"][1]
    assert found["draws"] == (None, "needs the data that the run was started with")


def another_key(run_dir):
    edit_json(run_dir / "secret.json", secret="00" * 32)


@pytest.mark.parametrize(
    "damage, unknown",
    [
        (lambda run: (run / "metrics.jsonl").unlink(), {"metrics", "draws"}),
        (lambda run: (run / "secret.json").unlink(), {"key", "data", "outside", "draws"}),
        (lambda run: (run / "summary.json").unlink(), {"summary"}),
        (another_key, {"data", "outside", "draws"}),
    ],
)
def test_what_cannot_be_checked_is_no_broken_promise(damage, unknown, copy, capsys):
    damage(copy)
    code, found = verify(capsys, copy)
    assert {promise for promise, (holds, _) in found.items() if holds is None} == unknown
    broken = [promise for promise, (holds, _) in found.items() if holds is False]
    assert broken == (["key"] if damage is another_key else []) and code == len(broken)


@pytest.mark.parametrize("name", ["verify", "report"])
def test_a_run_that_is_going_on_is_not_looked_at(name, copy, capsys):
    with directory.lock(copy), pytest.raises(SystemExit) as stop:
        main([name, str(copy)])
    assert stop.value.code == 2
    assert "expected a run that no other process is working on" in capsys.readouterr().err
    with directory.lock(copy, to_read=True):
        assert verify(capsys, copy)[0] == 0


def of_step(run_dir, step):
    return checkpoint.path_of(run_dir, step)


@pytest.fixture(scope="module")
def another_run(texts, tmp_path_factory):
    """A run of the same shape with another epsilon, and other parameters."""
    run_dir = tmp_path_factory.mktemp("another") / "run"
    main(command(texts, run_dir, ema=0.5, epsilon=50))
    return run_dir


def test_a_checkpoint_of_another_run_is_named(texts, another_run, copy, capsys):
    (copy / "summary.json").unlink()
    checkpoint.latest(copy).unlink()
    shutil.copyfile(of_step(another_run, 4), path := of_step(copy, 4))
    code, found = verify(capsys, copy)
    assert code == 1
    assert found["checkpoints"] == (
        False,
        f"{path}: is of another run: the ledger has another chain after step 4",
    )
    with pytest.raises(SystemExit) as stop:
        main([*command(texts, copy, ema=0.5), "--resume"])
    *_, last = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and "than the checkpoint: one of the two is of another run" in last


def test_what_is_no_run_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(tmp_path)])
    assert stop.value.code == 2 and "expected the directory of a run" in capsys.readouterr().err
