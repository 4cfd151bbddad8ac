"""A checkpoint is there whole or not at all, and gives back every bit."""

import errno
import hashlib
import itertools
import os
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedsim.files import TEMPORARY
from fedsim.run import checkpoint
from fedsim.run.checkpoint import CheckpointError, State, restored, save

PARAMS = {"a": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.array([-0.0, 1e-40, jnp.inf])}


def state(step=0):
    opt_state = optax.chain(optax.adam(0.1), optax.scale(2.0)).init(PARAMS)
    return State(PARAMS, opt_state, step=step, chain="0af9" * 16)


def test_what_is_restored_is_what_was_saved_bit_for_bit(tmp_path):
    save(tmp_path, 3, vars(state(3)))
    blank = State(*jax.tree.map(jnp.zeros_like, (PARAMS, state().opt_state)))
    found, expected = vars(restored(tmp_path, blank)), vars(state(3))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for before, after in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert np.asarray(before).dtype == np.asarray(after).dtype
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
    assert found["step"] == 3 and isinstance(found["step"], int)


def test_the_newest_is_found_and_few_are_kept(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (9, 10, 99, 100):
        save(tmp_path, step, vars(state(step)))
    assert checkpoint.latest(tmp_path).name == "step-00000100.safetensors"
    assert len(list((tmp_path / "checkpoints").iterdir())) == checkpoint.KEEP
    assert restored(tmp_path, state()).step == 100


def test_a_checkpoint_that_was_not_finished_does_not_count(tmp_path, monkeypatch):
    save(tmp_path, 1, vars(state(1)))

    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.write(tmp_path, 2, {"params": PARAMS, "step": 2})
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path).name == "step-00000001.safetensors"
    save(tmp_path, 2, vars(state(2)))
    assert restored(tmp_path, state()).step == 2


def test_what_killed_saves_left_behind_goes_with_the_next_one(tmp_path):
    left = checkpoint.path_of(tmp_path, 3)
    left.parent.mkdir()
    left.with_name(left.name + TEMPORARY).write_bytes(b"half")
    saved = checkpoint.write(tmp_path, 5, {"params": np.ones(2), "step": 5})
    assert [*left.parent.iterdir()] == [saved]


def test_every_bit_that_flips_is_noticed(tmp_path):
    """Those of the header too, of which the library reads what is not exactly as it wrote it."""
    state = {"params": {"w": jnp.arange(3, dtype=jnp.float16), "e": jnp.zeros((0, 2))}, "step": 2}
    path = checkpoint.write(tmp_path, 2, state, "0af9" * 16)
    whole = path.read_bytes()
    for at, bit in itertools.product(range(len(whole)), range(8)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match="was cut or changed"):
            checkpoint.load(path)


def test_loading_runs_no_code_of_the_file(tmp_path):
    """A pickle is data like any other, and refused as such, even with a digest that fits."""

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    packed = pickle.dumps({"params": Trap(), "step": 1})
    for name in ("trap.safetensors", "trap.msgpack"):
        (tmp_path / name).write_bytes(packed + hashlib.sha256(packed).digest())
        with pytest.raises(CheckpointError):
            checkpoint.load_params(tmp_path / name)
    assert not (tmp_path / "sprung").exists()
