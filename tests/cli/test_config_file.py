"""Defaults from a file of settings: TOML, YAML or JSON, each value as it stands in the file."""

import pytest
from refused import refuses

from fedsim.cli.main import parse

FLAGS = ["--data", "pydocs", "--epsilon", "4", "--num-steps", "3", "--run-dir", "runs/x"]


@pytest.fixture
def read(tmp_path):
    """The settings of `train` with a file of this text."""

    def read(text, suffix="yaml", *flags):
        file = tmp_path / f"run.{suffix}"
        file.write_text(text)
        given = parse(["train", f"--config={file}", "uls", *FLAGS, *flags]).keywords
        return given["privacy"], given["run"]

    return read


SAME = {
    "toml": 'delta = 1e-6\nlog_to = ["wandb", "mlflow"]\nuser_column = "007"\nresume = true\n',
    "yaml": "delta: 1e-6  # to YAML, a text\nlog_to: [wandb, mlflow]\nuser_column: 007\n"
    "resume: true\n",
    "json": '{"delta": 1e-6, "log_to": ["wandb", "mlflow"], "user_column": "007", "resume": true}',
}


@pytest.mark.parametrize("suffix", SAME)
def test_all_formats_give_the_same_settings(suffix, read):
    privacy, run = read(SAME[suffix], suffix)
    assert privacy.delta == 1e-6 and run.resume
    assert run.log_to == ("wandb", "mlflow") and run.data.user_column == "007"


def test_a_flag_wins_and_takes_one_value_or_several(read):
    text = "seed: 3\nlog_to: [wandb]\nlora_modules: [query, value]\n"
    _, run = read(text, "yaml", "--seed", "4", "--log-to", "tensorboard")
    assert run.seed == 4 and run.log_to == ("tensorboard",)
    assert run.model.lora_modules == "query,value"
    assert read("lora_modules: query")[1].model.lora_modules == "query"
    assert read("log_to: []\n")[1].log_to == () and read("")[1].seed is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("resume: often", "resume=often"),
        ("delta: null", "delta=null"),
        ("engine: {kind: ray}", "engine={'kind': 'ray'}"),
        ("seed: [1, 2]", "seed=['1', '2']"),
        ("- seed", "config"),
        ("seed: [1", "config"),
        ("lerning_rate: 1", "lerning_rate=1"),
        ("schedule: no", "schedule=no"),  # a word, as it stands there
    ],
)
def test_a_mistake_in_yaml_is_one_line(text, what, read):
    with refuses(what) as raised:
        read(text)
    assert "\n" not in str(raised.value)
