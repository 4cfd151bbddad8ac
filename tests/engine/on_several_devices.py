"""Devices that have a model between them: the sums of one device up to rounding, and its runs."""

import functools
import tracemalloc

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from refused import refuses

from fedsim.clipping import Clip, Strategy
from fedsim.clipping.contribution import lattice_bits
from fedsim.config import Algorithm, MeshShape, PrivacyConfig, run_config
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.engine.programs import UnfitDevice
from fedsim.engine.worker import MultiDeviceWorker, Worker
from fedsim.models import lora
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig, stacked
from fedsim.placement import make_mesh, shardings
from fedsim.run import checkpoint
from fedsim.run.console import Console
from fedsim.training import train

VOCAB, LENGTH, WIDTH = 24, 16, 8
CLIP = Clip(0.1)
SHAPES = ["fsdp:2"]
LARGER = ["tensor:2", "fsdp:2,tensor:2", "fsdp:4,tensor:2", "fsdp:8"]
SHAPES += [pytest.param(text, marks=pytest.mark.slow) for text in LARGER]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(5)
    examples = {"u": [rng.integers(VOCAB, size=size) for size in rng.integers(2, 17, 40)]}
    return Dataset(train=UserStore.from_examples(examples, max_length=LENGTH, vocab_size=VOCAB))


def config_of(**options):
    return TransformerConfig(VOCAB, LENGTH, WIDTH, num_layers=1, num_heads=2, **options)


def spread(params):
    """Parameters of which none is zero: adapters start with zeros, which hide mistakes."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), params)


@pytest.fixture(scope="module")
def whole(data):
    """A model all of whose parameters are trained."""
    task = LanguageModelTask(data, config_of())
    return task, spread(task.init(jax.random.key(0)))


@pytest.fixture(scope="module")
def adapters(data, whole):
    config = lora.adapted(config_of(), 2, 16.0, "query,up")
    frozen, own = (stacked(t, 1) for t in (whole[1], spread(lora.init(config, jax.random.key(1)))))
    return LanguageModelTask(data, config, frozen=frozen), own


def rows():
    """Five units of three rows, one of them with one row."""
    some = np.random.default_rng(2).integers(40, size=(5, 3))
    some[3, 1:] = -1
    return some


def numbers(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.int64)


@functools.cache
def worker(task, shape):
    return Worker(task, mesh=shape and MeshShape.parse(shape))


def summed(problem, shape, strategy="scan", units=None):
    task, params = problem
    units = rows() if units is None else units
    return worker(task, shape).lane_sum(0, params, units, CLIP, Strategy.parse(strategy))


def expect_alike(problem, shape, strategy):
    total, stats = summed(problem, shape, strategy)
    expected, of_one = summed(problem, None, strategy)
    found, known = numbers(total), numbers(expected)
    assert known.any() and np.abs(found - known).max() <= 2e-5 * np.abs(known).max()
    for column, values in zip(stats.columns(), of_one.columns(), strict=True):
        np.testing.assert_allclose(column, values, rtol=1e-5)


@pytest.mark.privacy
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_is_that_of_one_device_up_to_rounding(whole, shape):
    expect_alike(whole, shape, "scan")


@pytest.mark.slow
def test_so_it_is_in_several_passes_and_of_one_product(whole):
    expect_alike(whole, "fsdp:2", "scan:2")
    expect_alike(whole, "fsdp:2", "direct:3")


@pytest.mark.parametrize("shape", SHAPES)
def test_so_it_is_of_adapters_on_a_frozen_model_in_parts(adapters, shape):
    expect_alike(adapters, shape, "scan")


@pytest.mark.privacy
def test_a_unit_that_is_missing_takes_its_whole_numbers_and_no_others(whole):
    every, alone = rows(), rows()[1:2]
    less = numbers(summed(whole, "fsdp:2", units=np.delete(every, 1, axis=0))[0])
    own = numbers(summed(whole, "fsdp:2", units=alone)[0])
    assert np.array_equal(numbers(summed(whole, "fsdp:2", units=every)[0]), less + own)
    squares, most = int((own.astype(object) ** 2).sum()), 4 ** lattice_bits(len(own))
    assert 0.99 * most < squares <= most  # clipped


@pytest.mark.privacy
def test_a_program_that_does_not_store_gradients_is_not_used(whole, monkeypatch):
    monkeypatch.setattr("fedsim.clipping.scan.stored", lambda compute, i, some, before: compute(i))
    monkeypatch.setattr("fedsim.engine.worker.check_contributions", lambda *_: None)
    task, params = whole
    with pytest.raises(UnfitDevice, match="has lost the loop that stores gradients"):
        Worker(task, mesh=MeshShape(2)).lane_sum(0, params, rows(), CLIP, Strategy())


@pytest.mark.privacy
def test_each_device_that_computes_is_measured(whole, monkeypatch):
    seen = []
    monkeypatch.setattr("fedsim.engine.worker._fit", lambda device: seen.append(device))
    task, params = whole
    Worker(task, mesh=MeshShape(2)).lane_sum(0, params, rows(), CLIP, Strategy())
    assert seen == jax.local_devices()[:2]
    seen.clear()
    MultiDeviceWorker(task).lane_sum(0, params, rows(), CLIP, Strategy())
    assert {*seen} == {*jax.local_devices()}


def test_a_device_has_its_part_of_each_array_and_less_of_what_is_computed(whole):
    placed = worker(whole[0], "fsdp:2").programs.place(whole[1])
    for leaf in jax.tree.leaves(placed):
        assert {part.data.size for part in leaf.addressable_shards} == {leaf.size // 2}
    memory = {}
    for shape in (None, "fsdp:2"):
        summed(whole, shape)
        programs = worker(whole[0], shape).programs.compiled
        found = [program for key, program in programs.items() if key[0] == "sum"][0]
        memory[shape] = found.memory_analysis()
    assert memory["fsdp:2"].output_size_in_bytes < 0.6 * memory[None].output_size_in_bytes
    assert memory["fsdp:2"].temp_size_in_bytes < memory[None].temp_size_in_bytes


def test_evaluation_has_the_losses_of_one_device(whole):
    every = np.arange(40)
    nats, count = worker(whole[0], "fsdp:2").lane_nats(0, whole[1], every, "train")
    expected, known = worker(whole[0], None).lane_nats(0, whole[1], every, "train")
    assert count == known and nats == pytest.approx(expected, rel=1e-5)


def test_arrays_are_cut_along_their_longest_axis_that_can_be():
    params = {"blocks": {"w": np.zeros((8, 6, 4))}, "v": np.zeros(3), "e": np.zeros((12, 16))}

    def found(mesh):
        cut = shardings(params, make_mesh(MeshShape.parse(mesh)))
        return jax.tree.map(lambda sharding: tuple(sharding.spec), cut)

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
    own = shardings({"v": np.zeros(8)}, make_mesh(MeshShape(4, 2)))
    assert own["v"].spec == PartitionSpec(("fsdp", "tensor"))


def test_too_few_devices_are_a_mistake(whole):
    with refuses("mesh=fsdp:64"):
        Worker(whole[0], mesh=MeshShape(64))


def test_a_run_repeats_and_goes_on_on_other_meshes(tmp_path, monkeypatch, capsys):

    def run(name, **options):
        privacy = PrivacyConfig(epsilon=8.0, num_steps=2, batch_size=4, group_size=2)
        settings = {"data": "pydocs", "model": "micro", "seed": 3, "eval_examples": 4}
        settings |= {"engine": "local", "strategy": "scan", "checkpoint_every": 1, **options}
        config = run_config(run_dir=tmp_path / name, **settings)
        return train(Algorithm.ULS, privacy, config, Console())

    cut = run("cut", mesh="fsdp:2")
    assert "mesh fsdp:2" in cut["host"]
    again = run("again", mesh="fsdp:2")
    assert again["params_sha256"] == cut["params_sha256"]
    one = run("one")  # whose seed draws other noise
    assert one["params_sha256"] != cut["params_sha256"]
    for options in ({}, {"mesh": "fsdp:2,tensor:2"}):
        (tmp_path / "cut" / "checkpoints" / "step-00000002.safetensors").unlink()
        capsys.readouterr()
        other = run("cut", resume=True, **options)
        assert "another kind of host: " in capsys.readouterr().err and other["steps_done"] == 2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_checkpoint_is_that_of_whole_arrays_which_no_host_has(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(checkpoint, "SLAB", 2**18)
    rng = np.random.default_rng(0)
    sizes = {"blocks": {"w": (16, 256, 512)}, "e": (2048, 512), "t": (300, 1000), "v": (8,)}
    params = jax.tree.map(lambda n: rng.random(n, np.float32), sizes, is_leaf=_is_shape)
    mesh = make_mesh(MeshShape.parse(shape))

    def placed(tree):
        return jax.device_put(tree, shardings(tree, mesh))

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
