"""The typed signature of `fedsim.train`: it is the settings, and a type checker reads it."""

import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import fedsim
from fedsim.config import LoggerName, PrivacyConfig, RunConfig, flags_of
from fedsim.library.run import COLUMNS


def plain(kind):
    """A type as a caller may give it: a text for a path, a list for a tuple."""
    if kind == tuple[LoggerName, ...]:
        return Sequence[LoggerName]
    return kind | str if Path in get_args(kind) else kind


def test_it_has_every_setting_of_train_with_its_type():
    expected = {name: str | None for name in COLUMNS}
    for kind in (PrivacyConfig, RunConfig):
        for name, one in flags_of(kind).items():
            hints = get_type_hints(get_type_hints(kind)[one.group] if one.group else kind)
            expected[name] = plain(hints[one.field])
    del expected["data"]
    expected["run_dir"] = str | Path | None
    assert get_type_hints(fedsim.TrainSettings) == expected
    shown = inspect.signature(fedsim.train).parameters
    assert {name: shown[name].annotation for name in expected} == expected
    needed = {name for name in expected if shown[name].default is inspect.Parameter.empty}
    assert needed == fedsim.TrainSettings.__required_keys__ == {"epsilon", "num_steps"}
    assert shown["batch_size"].default == 128
    words, flags = fedsim.train.__doc__.split(), flags_of(PrivacyConfig) | flags_of(RunConfig)
    for name in expected:
        text = "" if name == "run_dir" or name in COLUMNS else " ".join(flags[name].text.split())
        assert f" {name}: {text}" in " ".join(words)


RIGHT = """
import fedsim

settings: fedsim.TrainSettings = {"epsilon": 4, "num_steps": 500, "sampling": "cyclic"}
fedsim.train("uls", data=[], **settings)
fedsim.train("els", "pydocs", epsilon=4, num_steps=9, lora_rank=8, budget_ledger="ledger")
"""
WRONG = {
    "lora_rnk=8": "reportCallIssue",
    'lora_rank="8"': "reportArgumentType",
    'engine="threads"': "reportArgumentType",
    "delta=[]": "reportArgumentType",
}


@pytest.mark.slow
def test_pyright_takes_a_right_call_and_refuses_a_misspelt_or_wrongly_typed_one(tmp_path):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    (tmp_path / "right.py").write_text(RIGHT)
    calls = [f'fedsim.train("uls", [], epsilon=4, num_steps=5, {wrong})' for wrong in WRONG]
    (tmp_path / "wrong.py").write_text("\n".join(["import fedsim", *calls]))
    config = {"extraPaths": [str(Path(fedsim.__file__).parents[1])], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", tmp_path], capture_output=True, text=True, timeout=300)
    faults = [
        (Path(fault["file"]).name, fault["range"]["start"]["line"], fault["rule"])
        for fault in json.loads(done.stdout)["generalDiagnostics"]
    ]
    assert faults == [("wrong.py", line, rule) for line, rule in enumerate(WRONG.values(), 1)]
