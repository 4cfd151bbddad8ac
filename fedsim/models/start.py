"""Where a model comes from: a size, a pretrained model, or a run; and what a run trains of it."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedsim import checkpoint, rundir
from fedsim.clipping import LocalSteps
from fedsim.config import ConfigError, RunConfig, expect
from fedsim.data import corpora
from fedsim.data.dataset import Dataset
from fedsim.data.text import Tokenizer
from fedsim.models import lora, pretrained
from fedsim.models.language_model import LanguageModelTask
from fedsim.models.pretrained import Pretrained
from fedsim.models.transformer import PRESETS, TransformerConfig, check_preset, preset


class Start(NamedTuple):
    """A task, and the state of its training before the first step."""

    task: LanguageModelTask
    params: Any
    """What is trained: the whole model, or its adapters."""


def find(source: str) -> Pretrained | None:
    """The model that `source` names; None for a size, whose parameters are fresh.

    Raises: ConfigError: there is none, or it cannot be used.
    """
    if source in PRESETS:
        return None
    path = Path(source)
    if (path / rundir.CONFIG).is_file() and not pretrained.is_directory(path):
        return of_run(path)
    if not path.exists() and not source.startswith(pretrained.HUB):
        check_preset(source)
    return pretrained.load(source)


def of_run(run_dir: Path) -> Pretrained:
    """The model of a run's last checkpoint; adapters are merged into theirs.

    Raises: ConfigError: there is no checkpoint, or the adapters' model is not what it was.
    """
    config, params, base = parts_of_run(run_dir)
    if base is not None:
        config, params = lora.merged(config, base.params, params)
    tokenizer = run_dir / rundir.TOKENIZER
    return Pretrained(config, params, tokenizer if tokenizer.is_file() else None)


def parts_of_run(run_dir: Path) -> tuple[TransformerConfig, Any, Pretrained | None]:
    """(config, parameters of the last checkpoint, the model they are adapters of, if they are)."""
    stored = rundir.load(run_dir)
    path = checkpoint.latest(run_dir)
    if path is None or "model" not in stored:
        raise ConfigError(f"run_dir={run_dir}: expected a run with a model and a checkpoint")
    config = TransformerConfig.from_dict(stored["model"])
    base = None
    if config.lora is not None:
        base = find(stored["run"]["model"])
        same = base is not None and sha256(base) == stored["identity"]["model"]
        expect("model", stored["run"]["model"], same, f"the model with which {run_dir} was started")
    return config, checkpoint.load_params(path), base


def sha256(model: Pretrained | None) -> str | None:
    """What a resumed run's model must have."""
    return model and checkpoint.params_sha256(model.params)


def load_data(run: RunConfig, model: Pretrained | None, progress: Any) -> Dataset:
    """The run's data; texts that are not tokenised yet become the model's own tokens."""
    options = run.data_options
    if model is not None and model.tokenizer is not None and not corpora.is_built(run.data):
        options.setdefault("tokenizer", str(model.tokenizer))
    return corpora.load(run.data, progress=progress, **options)


def begin(run: RunConfig, model: Pretrained | None, data: Dataset, key: jax.Array) -> Start:
    """The task of a run, and the parameters it starts from.

    Args: key: of fresh parameters.
    Raises: ConfigError: data and model do not fit, or there is nothing to adapt.
    """
    expect("lora_rank", run.lora_rank, run.lora_rank == 0 or model is not None, "0: fresh models")
    users, local = data.train, None
    if run.local_steps > 1:
        local = LocalSteps(run.local_steps, run.local_learning_rate)
    if model is None:
        config = preset(run.model, users.vocab_size, users.max_length, run.compute_dtype)
        config = dataclasses.replace(config, remat=run.remat)
        task = LanguageModelTask(data, config, local_steps=local)
        return Start(task, task.init(key))
    check_fit(run, model, data)
    config = dataclasses.replace(
        model.config,
        max_length=users.max_length,
        num_positions=model.config.table,
        dtype=None if run.compute_dtype == "float32" else run.compute_dtype,
        remat=run.remat,
    )
    if not run.lora_rank:
        return Start(LanguageModelTask(data, config, local_steps=local), model.params)
    config = lora.adapted(config, run.lora_rank, run.lora_alpha, run.lora_layers)
    return Start(LanguageModelTask(data, config, model.params, local), lora.init(config, key))


def check_fit(run: RunConfig, model: Pretrained, data: Dataset) -> None:
    """Raises ConfigError unless the data are the model's own tokens, and not too long for it."""
    expected = f"a model with a {pretrained.TOKENIZER}"
    if model.tokenizer is None:
        raise ConfigError(f"model={run.model}: expected {expected}")
    own = Tokenizer.load(model.tokenizer)
    found = data.metadata.get("tokenizer", {})
    build = f"fedsim data build ... --tokenizer {model.tokenizer}"
    expect(
        "data",
        f"{run.data} (tokens of {found.get('name', 'another tokenizer')})",
        found.get("sha256") == own.sha256 and own.vocab_size <= model.config.vocab_size,
        f"tokens of model={run.model}, as {build} gives",
    )
    length, longest = data.train.max_length, model.config.table
    expect("max_length", length, length <= longest, f"<= {longest}, the model's longest")
