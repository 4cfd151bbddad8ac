"""Bits that flip on a disk: in all that a resume, an export or a generation reads, it is seen."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_verify import command, write_texts

from fedsim.cli.main import main
from fedsim.errors import FedsimError
from fedsim.run.console import Console
from fedsim.run.model_source import find_model
from fedsim.trust.verify import verify

BUILT = [
    *("SHA256SUMS", "metadata.json", "tokenizer.json"),
    *(
        f"{split}/{name}"
        for split in ("train", "eval_users", "eval_examples", "test")
        for name in ("metadata.json", "users.parquet", "offsets.npy", "tokens.npy")
    ),
]
"""Files of built data."""
RUN = ["config.json", "tokenizer.json", "ledger.jsonl", "summary.json", "secret.json", "checkpoint"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(built data, a run on them): files are put back as they were by who changes one."""
    place = tmp_path_factory.mktemp("flips")
    texts = write_texts(place / "texts.parquet", num_users=60)
    table = pq.read_table(texts)
    turns = [int(user.as_py()[len("user") :]) for user in table["user_id"]]
    pq.write_table(table.append_column("turn", pa.array(turns)), texts)
    built = place / "built"
    order = ["--order-column", "turn", "--test-from", "55"]
    words = ["data", "build", str(texts), "--out", str(built), "--max-length", "24", *order]
    main([*words, "--eval-users", "0.2"])
    assert {str(path.relative_to(built)) for path in built.rglob("*") if path.is_file()} == {*BUILT}
    main(command(built, place / "run", **{"num-steps": 3, "max-length": None}))
    return built, place / "run"


def flips(path, number, seed=0):
    """Flip bits of a file, one at a time; yields (byte, bit) while it is flipped."""
    whole = path.read_bytes()
    rng = np.random.default_rng(seed)
    places = [0, 8 * len(whole) - 1, *rng.integers(0, 8 * len(whole), number).tolist()][:number]
    try:
        for place in places:
            at, bit = divmod(place, 8)
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            yield at, bit
    finally:
        path.write_bytes(whole)


def unnoticed(run_dir):
    """Whether verify finds no promise broken."""
    try:
        return all(check.holds is not False for check in verify(run_dir, console=Console()))
    except FedsimError:
        return False


def path_of(made, where, name):
    built, run_dir = made
    if name == "checkpoint":
        return max((run_dir / "checkpoints").glob("*.safetensors"))
    return (built if where == "built" else run_dir) / name


FILES = [("built", name) for name in BUILT] + [("run", name) for name in RUN]


STORM = pytest.param(40, marks=[pytest.mark.slow, pytest.mark.privacy])


@pytest.mark.parametrize("number", [2, STORM])
@pytest.mark.parametrize("where, name", FILES)
def test_a_bit_that_flips_in_any_file_is_noticed_by_verify(where, name, number, made):
    path = path_of(made, where, name)
    for at in flips(path, number, seed=len(name)):
        assert not unnoticed(made[1]), at
    assert unnoticed(made[1])


def test_a_resume_a_generation_and_an_export_refuse_what_was_changed(made, capsys, tmp_path):
    built, run_dir = made
    resume = [*command(built, run_dir, **{"num-steps": 3, "max-length": None}), "--resume"]
    export = ["export", str(run_dir), "--out", str(tmp_path / "out")]
    generate = ["generate", str(run_dir), "--prompt", "red"]
    cases = [(run_dir / "tokenizer.json", [resume, export, generate])]
    cases += [(path_of(made, "run", name), [resume]) for name in ("ledger.jsonl", "checkpoint")]
    for name in ("tokenizer.json", "eval_users/tokens.npy", "test/metadata.json"):
        cases.append((built / name, [resume]))
    for path, commands in cases:
        for _ in flips(path, 1):
            for words in commands:
                with pytest.raises(SystemExit) as stop:
                    main(words)
                *_, last = capsys.readouterr().err.splitlines()
                assert stop.value.code in (1, 2) and last.startswith("fedsim: error: "), words
                named = f"{path}|{path.parent}.*(changed|built by)|{path.name}.*: cut off"
                assert re.search(named, last)
    assert not (tmp_path / "out").exists()
    assert find_model(str(run_dir)) is not None
