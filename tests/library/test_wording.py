"""Callers of the library read Python's names, never a flag or a file of the cache."""

import pytest

from fedsim.errors import ConfigError, DataError
from fedsim.library.wording import in_python, to_python
from fedsim.run import Terminal

TABLE = "/home/ann/.cache/fedsim/tables/50788df29f11a6add3d71694dee930d6.parquet"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("use --delta 1e-6", "use delta=1e-6"),
        ("(--strategy scan:1 avoids this)", '(strategy="scan:1" avoids this)'),
        ("--resume continues from there", "resume=True continues from there"),
        (
            "a larger --batch-size or a small --lora-rank",
            "a larger batch_size or a small lora_rank",
        ),
        ("--budget-ledger names another one", "budget_ledger names another one"),
        ("the same command goes on where it was", "the same call goes on where it was"),
        ("`fedsim data build --long-texts split`", '`fedsim.data.build(long_texts="split")`'),
        (
            "look at it with: tensorboard --logdir r/tb",
            "look at it with: tensorboard --logdir r/tb",
        ),
        (f"data={TABLE}: expected rows", "data=the table: expected rows"),
        ("user_column=name: no such column", "user=name: no such column"),
        ("order_column=day: no such column", "order_column=day: no such column"),
    ],
)
def test_a_flag_becomes_a_name_of_python(text, said):
    assert in_python(text) == said


def test_a_column_that_was_given_by_its_setting_keeps_its_name():
    line = "user_column=name: no such column"
    assert in_python(line, {"user_column"}) == line


def test_errors_and_messages_of_a_block_are_translated(capsys):
    with pytest.raises(DataError, match=r"^user=name: expected less data$") as caught:
        with to_python():
            Terminal().warn("use --delta 1e-6")
            raise DataError.of("user_column", "name", "less --data") from None
    assert caught.value.field == "user" and caught.value.value == "name"
    assert capsys.readouterr().err == "warning: use delta=1e-6\n"
    with pytest.raises(ConfigError, match="^run_dir=r: expected resume=True$"), to_python("quiet"):
        Terminal().note("nothing")
        raise ConfigError.of("run_dir", "r", "--resume")
    assert capsys.readouterr().err == ""
