"""One table of refusals: a wrong setting has the same line in the settings, the library, and the
command line, where it ends with exit code 2."""

import pytest
from refused import refuses

import fedsim
from fedsim.cli.main import main
from fedsim.config import configs_of

GIVEN = {"data": "pydocs", "run_dir": "new", "epsilon": 4, "num_steps": 10, "batch_size": 8}
WHOLE = "batch_size group_size threads_per_worker checkpoint_every eval_every eval_examples"
# Settings of a training, and values that they refuse before any data are read.
WRONG = dict.fromkeys([*WHOLE.split(), "rows_per_pass"], [0])
WRONG |= dict.fromkeys(["loss_bound", "worker_timeout", "lora_alpha", "limit_epsilon"], [0.0])
WRONG |= dict.fromkeys(["max_shared_groups", "num_workers", "lora_rank"], [-1])
WRONG |= dict.fromkeys(["eval_epsilon", "wait_for_workers"], [-1.0])
WRONG |= dict.fromkeys(["clip_quantile", "eval_loss_bound", "ema"], [1.0])
WRONG |= {"epsilon": [0.0, -1.0], "delta": [2.0, 1.0, -0.1], "num_steps": [0, 10**9]}
WRONG |= {"clip_norm": ["nan", "inf", 0.0, 1e-09], "learning_rate": [-1.0, "inf", "nan"]}
WRONG |= {"group_size_epsilon": [5.0], "tuned_on_data": ["luck"], "participations": [3]}
WRONG |= {"bands": [2], "frozen_dtype": ["int8"], "max_length": [1]}
CASES = [(name, value) for name, values in WRONG.items() for value in values]
TYPES = [  # (a value of another type or no choice, what was expected)
    ("lora_rank", "8", "lora_rank='8': expected a valid integer"),
    ("epsilon", None, "number"),
    ("optimizer", 3, "string"),
    ("resume", "yes", "'yes': expected a valid boolean"),
    ("engine", "spmd", "'ray' or 'local'"),
    ("data", 7, "string"),
    ("log_to", ["loki"], "'tensorboard'"),
    ("lora_rnk", 8, "lora_rank"),
    ("user", "who", "such as user_column"),
    ("num_lanes", 0, "greater than or equal to 1"),
]


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
    settings[name] = float(value) if value in ("nan", "inf") else value
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
    with refuses(missing, says=f"{missing}: missing"):
        configs_of({name: value for name, value in GIVEN.items() if name != missing})
