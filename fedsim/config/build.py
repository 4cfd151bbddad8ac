"""Settings of `fedsim data build`: how texts are read, who owns them, and how they are encoded."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from fedsim.config.model import APath, Column, Names, settings
from fedsim.errors import DataError, expect

TrainOn = Literal["all", "completion", "assistant", "user"]
TextOrPath = Annotated[str, BeforeValidator(lambda x: str(x) if isinstance(x, Path) else x)]


@settings(error=DataError)
class BuildConfig:
    """Reading, owners and tokens of texts.

    With the sources, they determine the bytes of the data set."""

    user_column: Column = ()
    """Column with the user of a row; repeat it if several columns together name the user. A column
    of lists gives a text to several users. Default: user_id."""

    owners: Names = ()
    """Columns, separated by commas, for texts with several owners: a text belongs to everyone who
    is in one of them, as in from,to,cc. Instead of user_column."""

    owners_delimiter: str | None = None
    """Characters that separate several users in a cell of owners, as in ',;' for the addresses of a
    mail. Default: a cell is one user."""

    owner_key: str | None = None
    """Key of each turn of a chat that names who speaks, such as name. The chat belongs to all who
    speak in it. Turns of the assistant may name nobody. Instead of user_column."""

    unowned: Literal["refuse", "drop"] = "refuse"
    """Refuse data with rows without a user, or drop these rows."""

    text_column: Column = ()
    """Column with the text; repeat it for several, which are joined by newlines. Default: text."""

    messages_column: str | None = None
    """Column with chats: lists of {role, content}, or of {from, value}. Columns named messages,
    conversations, prompt and completion, or instruction and output are recognised if there is no
    text."""

    prompt_column: str | None = None
    """Column with prompts: texts, or lists of messages. Goes with completion_column."""

    completion_column: str | None = None
    """Column with the completions of the prompts."""

    train_on: TrainOn | None = None
    """Tokens of chats to train on. completion: of a chat, the assistant's last turn. Default: the
    completion of a prompt, and the assistant's turns of a chat."""

    chat_template: APath | None = None
    """File with the chat template. Default: the one in the directory of the tokenizer."""

    template_date: str = "2026-01-01"
    """Day that a chat template takes for today, so that equal data give equal tokens."""

    skip_unknown: bool = False
    """Leave out chats that cannot be read, with images or tool calls for example, and count them.
    Default: the first one is an error that names its row."""

    order_column: str | None = None
    """Column that orders a user's examples: numbers, or times such as 2020-01-31T10:00:00Z.
    Default: the order of the files."""

    tokenizer: TextOrPath = "bytes"
    """bytes, hf:NAME, a tokenizer file, or the directory of a model or a run that holds one."""

    tokenizer_is_public: bool = False
    """State that none of these texts was read to make the tokenizer. Without it, a tokenizer file
    is named as outside the guarantee. bytes and the tokenizers of models need no statement."""

    max_length: int = 128
    """Largest number of tokens of an example, the token at its beginning included. >= 2."""

    long_texts: Literal["cut", "split"] = "cut"
    """Cut texts of more than max_length tokens, or split them into several examples of the user."""

    eval_users: float = 0.05
    """Share of users held out of training, to evaluate on; chosen by a hash of their ids. In [0,
    1)."""

    eval_examples: bool = True
    """Also hold out a tenth of each training user's examples, at most 32."""

    min_examples: int = 1
    """Leave out users with fewer examples than this. >= 1."""

    test_from: str | None = None
    """Put rows whose order_column is at least this (such as 2018-01-01) into the split test."""

    delimiter: str | None = None
    """Character between the columns of CSV. Default: a comma, or a tab in files named .tsv."""

    encoding: str = "utf-8"
    """Encoding of CSV and JSON files, such as cp1252 (Excel's) or latin1."""

    quoting: Literal["none", "minimal"] | None = None
    """Meaning of quotation marks in CSV. minimal: they enclose values with delimiters or line ends.
    none: they are ordinary characters. Default: minimal, but a file that can be read either way is
    refused."""

    def __post_init__(self):
        expect("max_length", self.max_length, self.max_length >= 2, "at least 2 tokens")
        expect("eval_users", self.eval_users, 0 <= self.eval_users < 1, "a fraction in [0, 1)")
        expect("min_examples", self.min_examples, self.min_examples >= 1, "at least 1")
        owners = ",".join(self.owners)
        for name, value in {"owners": owners, "owner_key": self.owner_key}.items():
            alone = not value or not self.user_column
            expect("user_column", ",".join(self.user_column), alone, f"none beside {name}={value}")
