"""Processes that Ray Train starts and joins find the sum of one process."""

import hashlib

import jax
import numpy as np
import pytest

from fedsim.clipping import Clip, Strategy
from fedsim.data.dataset import Dataset
from fedsim.data.users import UserStore
from fedsim.engine import mesh
from fedsim.engine.arithmetic import UnfitDevice
from fedsim.engine.local_engine import LocalEngine
from fedsim.engine.resources import Placement
from fedsim.engine.worker import Worker
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.transformer import TransformerConfig

ROWS = np.arange(24).reshape(8, 3)
SUM = Clip(0.1), Strategy("scan", 3)


def problem():
    rng = np.random.default_rng(0)
    texts = {"user": [rng.integers(24, size=15) for _ in range(24)]}
    data = Dataset(train=UserStore.from_examples(texts, max_length=16, vocab_size=24))
    task = LanguageModelTask(data, TransformerConfig(24, 16, 8, 2, 2))
    return task, jax.tree.map(np.asarray, task.init(jax.random.key(0)))


def digest(total):
    leaves = (np.asarray(leaf).astype(np.int64).tobytes() for leaf in jax.tree.leaves(total))
    return hashlib.sha256(b"".join(leaves)).hexdigest()


def run(config):
    from pathlib import Path

    from fedsim.engine.mesh import mesh_sum

    total, stats = mesh_sum(*problem(), ROWS, *SUM)
    found = f"{jax.process_count()} {len(stats.norms)} {digest(total)}"
    (Path(config["out"]) / str(jax.process_index())).write_text(found)


@pytest.mark.privacy
def test_a_device_is_measured_before_its_first_sum(monkeypatch):
    def unfit(worker):
        raise UnfitDevice("products err")

    mesh._look_at_device.cache_clear()
    monkeypatch.setattr(Worker, "facts", unfit)
    with pytest.raises(UnfitDevice):
        mesh.mesh_sum(*problem(), ROWS, *SUM)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_processes_of_ray_train_find_the_sum_of_one(ray_cluster, tmp_path):
    from fedsim.engine.jax_trainer import launch

    out = tmp_path / "out"
    out.mkdir()
    launch(run, {"out": str(out)}, Placement(2, 1), tmp_path / "train")
    task, params = problem()
    total, _ = LocalEngine(task, num_lanes=2).clipped_sum(params, ROWS, *SUM)
    found = {path.name: path.read_text() for path in out.iterdir()}
    assert found == {"0": f"2 4 {digest(total)}", "1": f"2 4 {digest(total)}"}
