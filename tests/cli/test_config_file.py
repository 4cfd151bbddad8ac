"""Defaults from a file of settings: TOML or YAML, each value as it stands in the file."""

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
    "toml": 'delta = 1e-6\nlog_to = ["wandb", "mlflow"]\nuser_column = "007"\nresume = true\n'
    'accelerator = "gpu"\nbatch_size = 64\n',
    "yaml": "delta: 1e-6  # to YAML, a text\nlog_to: [wandb, mlflow]\nuser_column: 007\n"
    "resume: true\naccelerator: gpu\nbatch_size: 64\n",
    "json": '{"delta": 1e-6, "log_to": ["wandb", "mlflow"], "user_column": "007", "resume": true,'
    '"accelerator": "gpu", "batch_size": 64}',
    "yml": "delta: 0.000001\nlog_to:\n- wandb\n- mlflow\nuser_column: '007'\nresume: True\n"
    'accelerator: "gpu"\nbatch_size: 64\n',
}


@pytest.mark.parametrize("suffix", SAME)
def test_all_formats_give_the_same_settings(suffix, read):
    privacy, run = read(SAME[suffix], suffix)
    assert (privacy.delta, privacy.batch_size, run.resume) == (1e-6, 64, True)
    assert run.log_to == ("wandb", "mlflow") and run.data.user_column == "007"
    assert run.engine.accelerator == "gpu"


@pytest.mark.parametrize(
    "suffix, one, several",
    [
        ("toml", 'lora_modules = "query"', 'lora_modules = ["query", "value"]'),
        ("yaml", "lora_modules: query", "lora_modules: [query, value]"),
    ],
)
def test_a_flag_that_takes_one_value_or_several_has_lists(suffix, one, several, read):
    assert read(several, suffix)[1].model.lora_modules == "query,value"
    assert read(one, suffix)[1].model.lora_modules == "query"


def test_a_flag_wins_and_an_empty_list_is_none(read):
    text = "seed: 3\nlog_to: [wandb]\n"
    _, run = read(text, "yaml", "--seed", "4", "--log-to", "tensorboard")
    assert run.seed == 4 and run.log_to == ("tensorboard",)
    assert read("log_to: []\n")[1].log_to == () and read("")[1].seed is None


@pytest.mark.parametrize(
    ("text", "what", "says"),
    [
        ("resume: on", "resume=on", "a valid boolean"),
        ("resume: no", "resume=no", "a valid boolean"),
        ("delta: null", "delta=None", "a value"),
        ("tokenizer: ~", "tokenizer=None", "a value"),
        ("engine: {kind: ray}", "engine={'kind': 'ray'}", "'ray' or 'local'"),
        ("seed: [1, 2]", "seed=['1', '2']", "integer"),
        ("seed: 1\nseed: 2", "config", "seed is there twice"),
        ("? [a]\n: 3", "config", "names before each colon"),
        ("- seed", "config", "lines such as `num_steps: 200`"),
        ("seed: [1", "config", "a TOML, YAML or JSON file"),
        ("seed: &s 1\nnum_steps: *s", "config", "an alias"),
        ("lerning_rate: 1", "lerning_rate=1", "such as learning_rate"),
    ],
)
def test_a_mistake_in_yaml_is_one_line(text, what, says, read):
    with refuses(what, says=says) as raised:
        read(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("resume = 1", "resume=1"),
        ("epsilon = true", "epsilon=True"),
        ("seed = 2020-01-01", "seed"),
    ],
)
def test_a_mistake_in_toml_is_one_line(text, what, read):
    with refuses(what):
        read(text, "toml")


def test_a_word_of_yaml_that_means_no_stays_a_word(read):
    with refuses("recipe=no"):
        read("recipe: no")
