"""One table of refusals: a wrong setting has the same line in the settings, the library, and the
command line, where it ends with exit code 2."""

import pytest
from refused import refuses

import fedsim
from fedsim.cli.main import main
from fedsim.config import configs_of

GIVEN = {"data": "pydocs", "run_dir": "new", "epsilon": 4, "num_steps": 10, "batch_size": 8}
WRONG = {  # settings of a training, and values that they refuse before any data are read
    "epsilon": [0.0, -1.0],
    "delta": [2.0, 1.0, -0.1],
    "num_steps": [0, 10**9],
    "batch_size": [0],
    "group_size": [0],
    "clip_norm": ["nan", "inf", 0.0, 1e-09],
    "clip_quantile": [1.0],
    "group_size_epsilon": [5.0],
    "tuned_on_data": ["luck"],
    "max_shared_groups": [-1],
    "loss_bound": [0.0],
    "eval_epsilon": [-1.0],
    "eval_loss_bound": [1.0],
    "participations": [3],
    "bands": [2],
    "learning_rate": [-1.0, "inf", "nan"],
    "ema": [1.0],
    "num_workers": [-1],
    "threads_per_worker": [0],
    "checkpoint_every": [0],
    "eval_every": [0],
    "eval_examples": [0],
    "wait_for_workers": [-1.0],
    "worker_timeout": [0.0],
    "lora_rank": [-1],
    "lora_alpha": [0.0],
    "frozen_dtype": ["int8"],
    "rows_per_pass": [0],
    "max_length": [1],
    "limit_epsilon": [0.0],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]
TYPES = [  # (a value of another type or no choice, what was expected)
    ("lora_rank", "8", "integer"),
    ("epsilon", None, "number"),
    ("optimizer", 3, "string"),
    ("resume", "yes", "boolean"),
    ("engine", "spmd", "'ray' or 'local'"),
    ("data", 7, "string"),
    ("log_to", ["loki"], "'tensorboard'"),
    ("lora_rnk", 8, "lora_rank"),
    ("num_lanes", 0, "greater than or equal to 1"),
]


def number(value):
    return float(value) if isinstance(value, str) and value in ("nan", "inf") else value


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_wrong_setting_is_one_line_for_every_reader(name, value, capfd):
    settings = {**GIVEN, name: value}
    words = [f"--{field.replace('_', '-')}={given}" for field, given in settings.items()]
    with pytest.raises(SystemExit) as stop:
        main(["train", "uls", *words])
    out, err = capfd.readouterr()
    assert stop.value.code == 2 and not out
    line = err.splitlines()[-1].removeprefix("fedsim: error: ")
    assert line.startswith(f"{name}={value}: expected "), err
    settings[name] = number(value)
    with refuses(f"{name}={value}") as of_settings:
        configs_of(settings)
    with refuses(f"{name}={value}") as of_library:
        fedsim.train("uls", **settings)
    assert str(of_settings.value) == str(of_library.value) == line


@pytest.mark.parametrize(("name", "value", "expected"), TYPES)
def test_a_value_of_another_type_is_refused(name, value, expected):
    with refuses(name, says=expected):
        configs_of({**GIVEN, name: value})


@pytest.mark.parametrize("missing", ["data", "epsilon", "num_steps"])
def test_what_is_missing_is_named(missing):
    with refuses(f"{missing}=None"):
        configs_of({name: value for name, value in GIVEN.items() if name != missing})
