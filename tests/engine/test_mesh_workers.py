"""Workers whose devices have a model between them: what is refused, and Ray's."""

import jax
import numpy as np
import pytest
from problems import two_steps
from refused import refuses

from fedsim.clipping import Clip, Strategy
from fedsim.clipping.layers import UnsupportedModel
from fedsim.config import EngineConfig, MeshShape
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.engine.worker import Worker
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig

CLIP, ROWS = Clip(0.1), np.arange(12).reshape(4, 3)
ON_RAY = {"kind": "ray", "mesh": "fsdp:2", "strategy": "scan"}


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    texts = {"user": [rng.integers(24, size=15) for _ in range(12)]}
    data = Dataset(train=UserStore.from_examples(texts, max_length=16, vocab_size=24))
    task = LanguageModelTask(data, TransformerConfig(24, 16, 8, 1, 2))
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    return task, jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), shapes)


def test_a_second_step_compiles_nothing_and_a_sum_is_numpy(problem, compiled):
    task, params = problem
    worker = Worker(task, mesh=MeshShape())
    total, stats = worker.lane_sum(0, params, ROWS, CLIP, Strategy())
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(total)) and stats.norms.all()
    assert compiled
    compiled.clear()
    worker.lane_sum(1, params, ROWS, Clip(0.2), Strategy())  # C may move
    assert not compiled


@pytest.mark.parametrize(
    "settings, what",
    [
        ({"mesh": "fsdp:4,model:2"}, "mesh=fsdp:4,model:2"),
        ({"mesh": "data:2,fsdp:4"}, "mesh=data:2,fsdp:4"),
        ({"mesh": "fsdp"}, "mesh=fsdp"),
        ({"strategy": "ghost:1"}, "strategy=ghost:1"),
        ({"devices_per_worker": 4}, "devices_per_worker=4"),
    ],
)
def test_a_mistake_is_named(settings, what):
    with refuses(what):
        EngineConfig(**{**ON_RAY, **settings})


def test_a_mesh_says_how_many_devices_a_worker_has_whoever_says_it_again():
    assert EngineConfig(**ON_RAY, devices_per_worker=2) == EngineConfig(**ON_RAY)


@pytest.mark.privacy
def test_several_units_at_once_are_refused(problem):
    worker = Worker(problem[0], mesh=MeshShape())
    with pytest.raises(UnsupportedModel, match="strategy=direct:6: 2 units at once; .* on a mesh"):
        worker.lane_sum(0, problem[1], ROWS, CLIP, Strategy.parse("direct:6"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.ci
def test_ray_workers_give_the_same_bits_whatever_their_number(ray_cluster, tmp_path):
    def run(name, **options):
        return two_steps(tmp_path / name, strategy="scan", **options)

    cut = {"engine": "ray", "mesh": "fsdp:2"}
    one = run("one", num_workers=1, devices_per_worker=2, **cut)
    assert run("two", num_workers=2, **cut)["params_sha256"] == one["params_sha256"]
    (tmp_path / "one" / "checkpoints" / "step-00000002.safetensors").unlink()
    assert run("one", engine="local", resume=True)["steps_done"] == 2
