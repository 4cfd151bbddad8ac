"""Bits that flip on a disk: `verify` finds each of them, in a run's files and in its data."""

import numpy as np
import pytest
from test_verify import command, write_texts

from fedsim.cli.main import main
from fedsim.errors import FedsimError
from fedsim.run.console import Console
from fedsim.trust.verify import verify

OF_SPLIT = ("metadata.json", "users.parquet", "offsets.npy", "tokens.npy")
SPLITS = ("train", "eval_users", "eval_examples")
BUILT = ["SHA256SUMS", "metadata.json", "tokenizer.json"]
BUILT += [f"{split}/{name}" for split in SPLITS for name in OF_SPLIT]
RUN = ["config.json", "tokenizer.json", "ledger.jsonl", "summary.json", "secret.json"]
RUN += ["checkpoints/step-00000003.safetensors"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A directory with built data and a run on them: files are put back by who changes one."""
    place = tmp_path_factory.mktemp("flips")
    texts, built = write_texts(place / "texts.parquet", num_users=60), place / "built"
    main(["data", "build", str(texts), "--out", str(built), "--max-length", "24"])
    assert {str(path.relative_to(built)) for path in built.rglob("*") if path.is_file()} == {*BUILT}
    main(command(built, place / "run", **{"num-steps": 3, "max-length": None}))
    return place


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


STORM = pytest.param(40, marks=[pytest.mark.slow, pytest.mark.privacy])


@pytest.mark.parametrize("number", [2, STORM])
@pytest.mark.parametrize("file", [*(f"built/{name}" for name in BUILT), *(f"run/{n}" for n in RUN)])
def test_a_bit_that_flips_in_any_file_is_noticed_by_verify(file, number, made):
    for at in flips(made / file, number, seed=len(file)):
        assert not unnoticed(made / "run"), at
    assert unnoticed(made / "run")
