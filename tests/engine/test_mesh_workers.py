"""Ray workers whose devices have a model between them: the bits of this process alone."""

import jax
import numpy as np
import pytest
from problems import softmax_problem, two_steps

from fedsim.clipping import Clip, Strategy
from fedsim.clipping.observed import UnsupportedModel
from fedsim.config import EngineConfig, MeshShape
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.engine import create, reduction
from fedsim.engine.sharded import RemoteShardedWorker, ShardedWorker
from fedsim.engine.worker import NoTask
from fedsim.errors import ConfigError
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig, stacked

CLIP, ROWS = Clip(0.1), np.arange(12).reshape(4, 3)
ON_RAY = {"kind": "ray", "mesh": "fsdp:2", "strategy": "twice"}


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    texts = {"user": [rng.integers(24, size=15) for _ in range(12)]}
    data = Dataset(train=UserStore.from_examples(texts, max_length=16, vocab_size=24))
    task = LanguageModelTask(data, TransformerConfig(24, 16, 8, 1, 2))
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(np.float32), shapes)
    return task, stacked(params, 1)


def test_a_worker_that_gets_its_task_later_sends_the_same_sum_as_numpy(problem):
    task, params = problem
    worker = RemoteShardedWorker(None, MeshShape())
    with pytest.raises(NoTask):
        worker.lane_sum(0, params, ROWS, CLIP, Strategy("twice"))
    worker.begin(task)
    total, stats = worker.lane_sum(1, params, ROWS, CLIP, Strategy("twice"))
    expected, known = ShardedWorker.lane_sum(worker, 1, params, ROWS, CLIP, Strategy("twice"))
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(total))
    assert jax.tree.all(jax.tree.map(np.array_equal, total, expected))
    assert np.array_equal(stats.norms, known.norms) and stats.norms.all()


@pytest.mark.slow
@pytest.mark.ci
def test_a_second_step_compiles_nothing(problem):
    task, params = problem
    worker = ShardedWorker(task, MeshShape())
    worker.lane_sum(0, params, ROWS, CLIP, Strategy("twice"))
    events = []

    def listener(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    worker.lane_sum(1, params, ROWS, Clip(0.2), Strategy("twice"))  # C may move
    jax.monitoring.unregister_event_duration_listener(listener)
    assert not events


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mesh": "fsdp:4,model:2"}, "mesh=fsdp:4,model:2: expected data:N, fsdp:N and tensor:N"),
        ({"mesh": "fsdp"}, "mesh=fsdp: expected data:N, fsdp:N and tensor:N"),
        ({"strategy": "auto"}, "strategy=auto: expected layers or twice"),
        ({"devices_per_worker": 4}, "devices_per_worker=4: expected 2, those of mesh=data:1,fsdp"),
    ],
)
def test_a_mistake_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{**ON_RAY, **settings})


def test_a_mesh_says_how_many_devices_a_worker_has_whoever_says_it_again():
    assert EngineConfig(**ON_RAY, devices_per_worker=2) == EngineConfig(**ON_RAY)


def test_sums_without_noise_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="strategy=twice: expected another one without noise"):
        reduction(EngineConfig(**ON_RAY), exact=False)


@pytest.mark.privacy
def test_no_more_units_are_added_at_once_than_int32_holds(problem, monkeypatch):
    monkeypatch.setattr("fedsim.engine.worker.lattice_capacity", lambda dimensions: 0)
    with pytest.raises(UnsupportedModel, match="strategy=twice: 1 units at once; .* at most 0, wh"):
        ShardedWorker(problem[0], MeshShape()).lane_sum(
            0, problem[1], ROWS, CLIP, Strategy("twice")
        )


@pytest.mark.parametrize("kind", ["ray", "local"])
def test_a_task_without_layers_is_refused_before_workers_start(rng, kind):
    _, task, _ = softmax_problem(rng, [4] * 5)
    with pytest.raises(ConfigError, match="mesh=data:1,fsdp:1: expected none: the task has no la"):
        create(EngineConfig(kind, strategy="twice"), task)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.ci
def test_runs_are_those_of_this_process_and_go_on_there(ray_cluster, tmp_path):
    def run(name, **options):
        return two_steps(tmp_path / name, strategy="twice", **options)

    alone = run("alone", engine="local")
    cut = {"engine": "ray", "num_workers": 1, "devices_per_worker": 4, "mesh": "fsdp:4"}
    assert run("cut", **cut)["params_sha256"] == alone["params_sha256"]
    several = run("several", engine="ray", num_workers=2, mesh="data:2,fsdp:2")
    assert several["params_sha256"] == alone["params_sha256"]
    (tmp_path / "cut" / "checkpoints" / "step-00000002.safetensors").unlink()
    again = run("cut", engine="local", resume=True)
    assert again["params_sha256"] == alone["params_sha256"]
