"""Devices that have a model between them: the whole numbers, and the runs, of one device."""

import functools
import tracemalloc

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pretrained_models import make_model, make_texts

from fedsim.clipping import Clip, Strategy
from fedsim.clipping.clip import lattice_bits
from fedsim.config import Algorithm, MeshShape, PrivacyConfig, run_config
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.engine.engine import EngineError
from fedsim.engine.sharded import ShardedWorker, _Units, make_mesh, specs_of
from fedsim.engine.worker import Worker
from fedsim.errors import ConfigError
from fedsim.models import lora
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig, stacked
from fedsim.run import checkpoint
from fedsim.run.console import Console
from fedsim.training import train

VOCAB, LENGTH, WIDTH = 24, 40, 8  # buckets of 32 and 40 tokens
CLIP = Clip(0.1)
SHAPES = ["fsdp:2"]
LARGER = ["data:2", "tensor:2", "data:2,fsdp:2", "fsdp:2,tensor:2", "fsdp:4", "data:2,fsdp:4"]
LARGER += ["fsdp:4,tensor:2", "data:2,fsdp:2,tensor:2", "fsdp:8"]
SHAPES += [pytest.param(text, marks=pytest.mark.slow) for text in LARGER]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(5)
    sizes = [rng.integers(*ends) for ends in ((2, 33), (33, 41)) for _ in range(20)]
    examples = {"u": [rng.integers(VOCAB, size=size) for size in sizes]}
    return Dataset(train=UserStore.from_examples(examples, max_length=LENGTH, vocab_size=VOCAB))


def config_of(**options):
    return TransformerConfig(VOCAB, LENGTH, WIDTH, num_layers=2, num_heads=2, **options)


def spread(params):
    """Parameters of which none is zero: adapters start with zeros, which hide mistakes."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), params)


@pytest.fixture(scope="module")
def whole(data):
    """A model all of whose parameters are trained."""
    task = LanguageModelTask(data, config_of())
    return task, stacked(spread(task.init(jax.random.key(0))), 2)


@pytest.fixture(scope="module")
def adapters(data, whole):
    config = lora.adapted(config_of(), 2, 16.0, "query,up")
    own = stacked(spread(lora.init(config, jax.random.key(1))), 2)
    return LanguageModelTask(data, config, frozen=whole[1]), own


def rows():
    """Five units of three rows, one of them with one row."""
    some = np.random.default_rng(2).integers(40, size=(5, 3))
    some[3, 1:] = -1
    return some


def numbers(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.int64)


@functools.cache
def worker(task, shape):
    return ShardedWorker(task, MeshShape.parse(shape))


def summed(problem, shape, strategy="twice", units=None, clip=CLIP):
    task, params = problem
    units = rows() if units is None else units
    return worker(task, shape).lane_sum(0, params, units, clip, Strategy(strategy))


@pytest.mark.parametrize("strategy", ["layers", "twice"])
def test_the_sum_is_that_of_scan_up_to_rounding(whole, strategy):
    total, stats = summed(whole, "fsdp:1", strategy)
    expected, of_scan = Worker(whole[0]).lane_sum(0, whole[1], rows(), CLIP, Strategy("scan"))
    assert np.abs(numbers(total) - numbers(expected)).max() <= 2e-5 * np.abs(numbers(total)).max()
    for found, known in zip(stats.columns(), of_scan.columns(), strict=True):
        np.testing.assert_allclose(found, known, rtol=1e-5)


@pytest.mark.privacy
@pytest.mark.parametrize("shape", SHAPES)
def test_several_devices_find_the_whole_numbers_of_one(whole, shape):
    total, stats = summed(whole, shape)
    expected, of_one = summed(whole, "fsdp:1")
    assert np.array_equal(numbers(total), numbers(expected))
    for found, known in zip(stats.columns(), of_one.columns(), strict=True):
        assert np.array_equal(found, known)
    kept, _ = summed(whole, shape, "layers")
    assert np.array_equal(numbers(kept), numbers(expected))


@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_on_a_frozen_model_in_parts_have_the_whole_numbers_of_one_device(adapters, shape):
    found = numbers(summed(adapters, shape, "layers")[0])
    assert found.any() and np.array_equal(found, numbers(summed(adapters, "fsdp:1", "layers")[0]))


@pytest.mark.privacy
def test_a_unit_that_is_missing_takes_its_whole_numbers_and_no_others(whole):
    every, alone = rows(), rows()[1:2]
    less = numbers(summed(whole, "fsdp:2", units=np.delete(every, 1, axis=0))[0])
    own = numbers(summed(whole, "fsdp:2", units=alone)[0])
    assert np.array_equal(numbers(summed(whole, "fsdp:2", units=every)[0]), less + own)
    squares, most = int((own.astype(object) ** 2).sum()), 4 ** lattice_bits(len(own))
    assert 0.99 * most < squares <= most  # clipped


@pytest.mark.privacy
def test_a_second_pass_that_finds_another_gradient_ends_the_sum(whole, monkeypatch):
    once = _Units._back
    passes = []

    def other(self, seen, of_head, dx):
        passes.append(None)
        factor = np.float32(1 if len(passes) == 1 else 1 + 2**-20)
        return once(self, seen, of_head, [x * factor for x in dx])

    monkeypatch.setattr(_Units, "_back", other)
    with pytest.raises(EngineError, match="another one when it was computed again"):
        summed(whole, "fsdp:1")


def test_a_device_has_its_part_of_each_array_and_no_more(whole):
    placed = worker(whole[0], "fsdp:2").place(whole[1])
    total, _ = summed(whole, "fsdp:2")
    for tree in (placed, total):
        for leaf in jax.tree.leaves(tree):
            assert {part.data.size for part in leaf.addressable_shards} == {leaf.size // 2}


def test_evaluation_has_the_losses_of_one_device(whole):
    every = np.arange(40)
    nats, count = worker(whole[0], "fsdp:2").lane_nats(0, whole[1], every, "train")
    expected, known = Worker(whole[0]).lane_nats(0, whole[1], every, "train")
    assert count == known and nats == pytest.approx(expected, rel=1e-5)
    assert worker(whole[0], "fsdp:1").lane_nats(0, whole[1], every, "train") == (nats, count)


def test_arrays_are_cut_along_their_longest_axis_that_can_be():
    params = {"blocks": {"w": np.zeros((8, 6, 4))}, "v": np.zeros(3), "e": np.zeros((12, 16))}

    def found(mesh):
        specs = specs_of(params, MeshShape.parse(mesh))
        return jax.tree.map(tuple, specs, is_leaf=lambda x: not isinstance(x, dict))

    assert found("fsdp:4") == {
        "blocks": {"w": (None, None, "fsdp")},
        "v": (None,),
        "e": (None, "fsdp"),
    }
    assert found("fsdp:4,tensor:2") == {
        "blocks": {"w": (None, "tensor", "fsdp")},
        "v": (None,),
        "e": ("tensor", "fsdp"),
    }
    own = specs_of({"v": np.zeros(8)}, MeshShape(1, 4, 2))
    assert own["v"] == PartitionSpec(("fsdp", "tensor"))


def test_too_few_devices_are_a_mistake(whole):
    with pytest.raises(ConfigError, match="mesh=data:64,fsdp:1: expected at most .* devices"):
        ShardedWorker(whole[0], MeshShape(64))


@pytest.mark.parametrize("shape", SHAPES)
def test_runs_are_equal_and_go_on_on_other_meshes(tmp_path, monkeypatch, shape):
    def run(name, **options):
        privacy = PrivacyConfig(epsilon=8.0, num_steps=2, batch_size=4, group_size=2)
        settings = {"data": "pydocs", "model": "micro", "seed": 3, "eval_examples": 4}
        settings |= {"engine": "local", "strategy": "twice", "checkpoint_every": 1, **options}
        config = run_config(run_dir=tmp_path / name, **settings)
        return train(Algorithm.ULS, privacy, config, Console())

    one, several = run("one"), run("several", mesh=shape)
    assert several["params_sha256"] == one["params_sha256"]
    last = tmp_path / "several" / "checkpoints" / "step-00000002.safetensors"
    last.unlink()
    assert run("several", resume=True)["params_sha256"] == one["params_sha256"]  # on one device
    last.unlink()
    again = run("several", resume=True, mesh=shape)
    assert again["params_sha256"] == one["params_sha256"]


def test_an_optimizer_that_adds_up_over_an_array_is_refused_before_anything_is_released(tmp_path):
    settings = {"data": "pydocs", "model": "micro", "optimizer": "adafactor", "mesh": "fsdp:2"}
    config = run_config(run_dir=tmp_path / "run", engine="local", strategy="twice", **settings)
    privacy = PrivacyConfig(epsilon=8.0, num_steps=1, batch_size=4, group_size=2)
    with pytest.raises(ConfigError, match="optimizer=adafactor: expected one that takes each"):
        train(Algorithm.ULS, privacy, config, Console())
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    return {"model": str(make_model(directory)), "data": str(make_texts(directory))}


@pytest.mark.parametrize("shape", SHAPES)
def test_runs_of_adapters_on_a_model_in_parts_are_equal(tmp_path, files, shape):
    def run(name, **options):
        privacy = PrivacyConfig(epsilon=8.0, num_steps=2, batch_size=8, group_size=2)
        settings = {"lora_rank": 2, "seed": 3, "eval_examples": 4, "max_length": 32, **files}
        settings |= {"engine": "local", "strategy": "layers", "optimizer": "adam", **options}
        config = run_config(run_dir=tmp_path / name, **settings)
        return train(Algorithm.ULS, privacy, config, Console())

    one, several = run("one"), run("several", mesh=shape)
    assert several["params_sha256"] == one["params_sha256"]
    assert several["final_eval_loss"] == one["final_eval_loss"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_is_that_of_whole_arrays_which_no_host_has(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(checkpoint, "SLAB", 2**18)
    rng = np.random.default_rng(0)
    sizes = {"blocks": {"w": (16, 256, 512)}, "e": (2048, 512), "t": (300, 1000), "v": (8,)}
    params = jax.tree.map(lambda n: rng.random(n, np.float32), sizes, is_leaf=_is_shape)
    mesh = MeshShape.parse(shape)
    cut, specs = make_mesh(mesh), specs_of(params, mesh)

    def placed(tree):
        return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(cut, s)), tree, specs)

    state = {"params": placed(params), "step": 1}
    for name in ("warm", "whole"):
        (tmp_path / name).mkdir()
    checkpoint.save(tmp_path / "warm", 1, state)  # compiles
    path, most = _most_of_the_host(lambda: checkpoint.save(tmp_path, 1, state))
    whole = checkpoint.save(tmp_path / "whole", 1, {"params": params, "step": 1})
    assert path.read_bytes() == whole.read_bytes()
    assert most < 2**21 < params["blocks"]["w"].nbytes / 3
    like = {"params": placed(jax.tree.map(np.zeros_like, params)), "step": 0}
    found, most = _most_of_the_host(lambda: checkpoint.restore(path, like)[0]["params"])
    assert most < 2**21
    assert checkpoint.params_sha256(found) == checkpoint.params_sha256(params)
    for leaf, expected in zip(*map(jax.tree.leaves, (found, like["params"])), strict=True):
        assert leaf.sharding == expected.sharding


def _is_shape(tree):
    return isinstance(tree, tuple)


def _most_of_the_host(function):
    """(what a function returns, the most bytes that Python and NumPy had for it)."""
    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
