"""The safetensors format: arrays come back bit for bit, and a damaged file is one line."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from zoo import write_in_two

from fedsim.errors import ConfigError
from fedsim.models import weights
from fedsim.models.weights import TensorError

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.array([1.5, -2], ml_dtypes.bfloat16),
    "f16": np.array([[0.25]], np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "count": np.array(7, np.int64),
}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        np.testing.assert_array_equal(found[name], tensor)


def test_arrays_come_back_from_one_file_or_several(tmp_path):
    weights.write(tmp_path / weights.SINGLE, TENSORS)
    assert_same(weights.read_directory(tmp_path), TENSORS)
    (tmp_path / weights.SINGLE).unlink()
    write_in_two(tmp_path, TENSORS)
    assert_same(weights.read_directory(tmp_path), TENSORS)


def header(**about):
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **about}})
    return len(text).to_bytes(8, "little") + text.encode() + bytes(8)


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "header too small"),
        (header()[:-1], "file not fully covered"),
        (header(dtype="F8_E4M3", shape=[8]), "w has the type F8_E4M3"),
        (header(dtype="\n\x1b[2J" * 99), "expected a safetensors file"),
        ((10**6).to_bytes(8, "little") + b"[" * 10**6, "expected a safetensors file"),
    ],
)
def test_a_damaged_file_is_one_line(data, message, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(TensorError, match=message) as error:
        weights.read_directory(tmp_path)
    assert str(error.value).isprintable() and len(str(error.value)) < 600


def test_a_file_is_written_whole_or_not_at_all(monkeypatch, tmp_path):
    file = tmp_path / "x"
    weights.write(file, TENSORS)
    before = file.read_bytes()
    (tmp_path / "plain").touch()
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode & ~0o022

    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(OSError, match="No space left") as error:
        weights.write(file, {})
    assert error.value.filename == str(file)
    assert file.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"x", "plain"}


def test_an_index_that_does_not_hold_is_refused(tmp_path):
    with pytest.raises(TensorError, match="expected model.safetensors or"):
        weights.read_directory(tmp_path)
    write_in_two(tmp_path, TENSORS)
    index = tmp_path / weights.INDEX
    record = json.loads(index.read_text())
    for name, file, message in (
        ("a", "../x.safetensors", "names of files beside it"),
        ("a", "gone.safetensors", "expected a file that exists"),
    ):
        changed = {"weight_map": {**record["weight_map"], name: file}}
        index.write_text(json.dumps(changed))
        with pytest.raises(TensorError, match=message):
            weights.read_directory(tmp_path)
    for wrong in ("[]", '{"weight_map": {"a": 1}}'):
        index.write_text(wrong)
        with pytest.raises(ConfigError, match=f"model={index}: expected"):
            weights.read_directory(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(TensorError, match="model.safetensors: .*pointer of Git LFS.*git lfs pull"):
        weights.read_directory(tmp_path)
