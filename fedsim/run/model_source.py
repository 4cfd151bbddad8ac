"""The model that a run starts from (a size, a pretrained model or a run), and the task it
trains."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedsim.config import DataConfig, RunConfig, Unasked
from fedsim.data import Dataset, Tokenizer, corpora, tokenizer_is_public
from fedsim.errors import ConfigError, expect
from fedsim.files import expand_home, near
from fedsim.models import (
    PRESETS,
    LanguageModelTask,
    Pretrained,
    TransformerConfig,
    frozen,
    lora,
    peft_files,
    preset,
    stacked,
    unstacked,
    weights,
)
from fedsim.run import checkpoint, directory
from fedsim.run.directory import StoredRun
from fedsim.run.terminal import Terminal

DEEP = 6  # from so many layers on, a loop over stacked layers saves more in compiling than it costs
# Frozen weights of other types than float32 are stacked in any case; see models/frozen.py.
FRESH = "0: fresh models are trained whole; adapters take a pretrained model"


def find_model(
    source: str, console: Terminal | None = None, *, as_stored: bool = False
) -> Pretrained | None:
    """Load the model that `source` names; None for a size, whose parameters are fresh.

    Args:
      source: a size such as micro, hf:NAME, a directory, or a run's directory.
      console: shows the progress.
      as_stored: keep matrices in bfloat16 as they are stored, to be frozen.

    Raises: ConfigError: there is no such model, or it cannot be used.
    """
    if source in PRESETS:
        return None
    source = expand_home("model", source)
    path = Path(source)
    if (path / directory.CONFIG).is_file() and not weights.is_directory(path):
        return model_of_run(path)
    if not path.exists() and not source.startswith(weights.HUB):
        is_path = source.count("/") != 1 or path.parent.exists()
        sizes = "" if "/" in source else f"one of {', '.join(PRESETS)}, hf:NAME, or "
        other = sizes if is_path else f"{weights.HUB}{source}, or "
        beside = near(path, f"*/{directory.CONFIG}")
        raise ConfigError.of("model", source, f"{other}a directory that exists{beside}")
    with (console or Terminal()).phase(f"loading model={source}"):
        return weights.load(source, as_stored=as_stored)


def model_of_run(run_dir: Path) -> Pretrained:
    """The model of a run's last checkpoint, with adapters merged. Raises ConfigError: there is no
    checkpoint, or the model of the adapters has changed."""
    config, params, base = parts_of_run(run_dir)
    if base is not None:
        config, params = lora.merged(config, base.params, params)
    else:
        params = unstacked(params)
    files = files_of_run(run_dir)
    places = [*([files / weights.TOKENIZER] if files else []), run_dir / directory.TOKENIZER]
    tokenizer = next((path for path in places if path.is_file()), None)
    return Pretrained(config, params, tokenizer, files)


def files_of_run(run_dir: Path) -> Path | None:
    """Directory with the files of the model that a run started from, if it has any. Raises
    FileDamaged: a file was changed."""
    if not (files := directory.load(run_dir).files):
        return None
    weights.check_side_files(run_dir / directory.MODEL, files)
    return run_dir / directory.MODEL


def parts_of_run(run_dir: Path) -> tuple[TransformerConfig, Any, Pretrained | None]:
    """The configuration of a run's model; the parameters of the last checkpoint; the model that
    they adapt, or None. Raises ConfigError: there is no checkpoint, or no language model in it."""
    stored = directory.load(run_dir)
    expect_language_model(stored)
    config, base = TransformerConfig.from_dict(dict(stored.model)), None
    if config.lora is not None:
        source = stored.run.model.source
        base = find_model(source, as_stored=True)
        same = base is not None and model_sha256(base) == stored.identity.model
        expect("model", source, same, f"the model with which {run_dir} was started")
        assert base is not None
        base = base._replace(params=frozen.as_frozen(base.params, stored.run.model.frozen_dtype))
    if (path := checkpoint.latest(run_dir)) is None:
        raise ConfigError.of("run_dir", run_dir, "a run with a model and a checkpoint")
    return config, checkpoint.load_params(path), base


def save_model(
    source: str, out: Path, card: dict[str, str], *, adapter: bool = False, exact: bool = False
) -> None:
    """Write a model, or only the adapters of a run, into the new directory `out`.

    Args:
      source: the directory of a run or of a model, or hf:NAME.
      card: the model card, by its name; empty for none.
      exact: as of `weights.save`.

    Raises: ConfigError: there is no such model, `out` exists, or no known family has its parts.
    """
    if adapter:
        config, params, base = parts_of_run(Path(source))
        expect("adapter", True, base is not None, f"a run with LoRA, and {source} is none")
        of_base = weights.named(directory.load(Path(source)).run.model.source)
        peft_files.save(out, config, params, *of_base, files_of_run(Path(source)), card)
        return
    model = find_model(source)
    expect("model", source, model is not None, "the directory of a run or a model")
    assert model is not None
    weights.save(out, model.config, model.params, model.tokenizer, model.files, card, exact=exact)


def model_sha256(model: Pretrained | None) -> str | None:
    """Digest of the float32 values of a model's parameters, which a resumed run compares; None for
    fresh parameters."""
    return model and checkpoint.params_sha256(model.params, np.float32)


def model_name(source: str) -> str:
    """The setting `model` for others to read: without the directories of this machine."""
    return source if source.startswith(weights.HUB) else Path(source).name


def load_data(
    config: DataConfig, model: Pretrained | None, progress: Callable[[str], None]
) -> Dataset:
    """Load a run's data; texts that are not tokenised yet are tokenised by the model's
    tokenizer."""
    options = config.options
    if model is not None and model.tokenizer is not None and not corpora.is_built(config.source):
        options.setdefault("tokenizer", str(model.tokenizer))
    return corpora.load(config.source, progress=progress, **options)


def expect_same_model(stored: StoredRun, described: Mapping[str, Any]) -> None:
    """Raise ConfigError if a resumed run would compute another function of its parameters, as when
    another version reads the model's files differently.

    Args: described: as `Task.describe` gives it.
    """
    was, now = dict(stored.model), dict(described)
    if "task" not in {**was, **now}:  # those of other versions may lack settings at their defaults
        was, now = TransformerConfig.from_dict(was), TransformerConfig.from_dict(now)
    expected = f"the model with which {stored.run.run_dir} was started, whose config was another"
    expect("model", stored.run.model.source, was == now, expected)


def expect_language_model(stored: StoredRun) -> None:
    """Raise ConfigError if the run trained a custom task instead of a language model."""
    if task := stored.model.get("task"):
        expected = "a run of a language model, found the task"
        raise ConfigError.of("run_dir", stored.run.run_dir, f"{expected} {task}")


def make_task(
    run: RunConfig, model: Pretrained | None, data: Dataset, key: jax.Array
) -> tuple[LanguageModelTask, Any]:
    """The task of a run, and the parameters that it trains, before the first step: those of the
    whole model, or its adapters.

    Args: key: of fresh parameters.

    Raises: ConfigError: data and model do not fit, or there is no model to adapt.
    """
    wanted, users = run.model, data.train
    dtype = None if wanted.compute_dtype == "float32" else wanted.compute_dtype
    if model is None:
        expect("lora_rank", wanted.lora_rank, wanted.lora_rank == 0, FRESH)
        expect_asked(wanted.source, data)
        config = preset(wanted.source, users.vocab_size, users.max_length)
        config = dataclasses.replace(config, dtype=dtype, remat=wanted.remat)
        task = LanguageModelTask(data, config)
        return task, task.init(key)
    check_fit(run, model, data)
    config = dataclasses.replace(
        model.config,
        max_length=users.max_length,
        num_positions=model.config.table,
        dtype=dtype,
        remat=wanted.remat,
    )
    if wanted.lora_rank == 0:
        return LanguageModelTask(data, config), model.params
    rslora, modules = wanted.lora_scaling == "rslora", str(wanted.lora_modules)
    config = lora.adapted(config, wanted.lora_rank, wanted.lora_alpha, modules, rslora)
    assert config.lora is not None
    below = frozen.as_frozen(model.params, wanted.frozen_dtype)
    of_weights = dataclasses.replace(config.lora, frozen=frozen.type_of(below))
    config = dataclasses.replace(config, lora=of_weights)
    adapters = lora.init(config, key)
    if config.num_layers >= DEEP or of_weights.frozen != "float32":
        below, adapters = (stacked(tree, config.num_layers) for tree in (below, adapters))
    return LanguageModelTask(data, config, below), adapters


def expect_asked(source: str, data: Dataset) -> None:
    """Raise ConfigError if a new model is a default, and the tokens are of a pretrained one."""
    name = data.metadata.get("tokenizer", {}).get("name", "bytes")
    declared = data.metadata.get("settings", {}).get("tokenizer_is_public")
    is_of_model = name != "bytes" and tokenizer_is_public(data.metadata) and not declared
    if is_of_model and source is Unasked.MODEL:
        those = name if name.startswith(weights.HUB) else "the directory of the model"
        expected = f"{those} whose tokens these data have, or {source} for a new one"
        raise ConfigError(f"model: missing, expected {expected}", field="model")


def check_fit(run: RunConfig, model: Pretrained, data: Dataset) -> None:
    """Raise ConfigError if the data have another tokenizer than the model, tokens that it does not
    know, or too long examples."""
    if model.tokenizer is None:
        raise ConfigError.of("model", run.model.source, f"a model with a {weights.TOKENIZER}")
    tokenizer, stored = Tokenizer.load(model.tokenizer), data.metadata.get("tokenizer", {})
    found = f"{run.data.source} (tokens of {stored.get('name', 'another tokenizer')})"
    build = f"tokenizer={model.tokenizer} of `fedsim data build`"
    expected = f"tokens of model={run.model.source}, as {build} gives"
    expect("data", found, stored.get("sha256") == tokenizer.sha256, expected)
    known = model.config.vocab_size
    if tokenizer.vocab_size > known:  # by special tokens that texts need not have, as Gemma 3 does
        largest = max(store.largest_id() for store in data.splits().values())
        expect("data", f"{run.data.source} (token {largest})", largest < known, f"ids < {known}")
    length, longest = data.train.max_length, model.config.table
    expect("max_length", length, length <= longest, f"<= {longest}, the model's longest")
