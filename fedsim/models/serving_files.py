"""Side files of a saved model that programs need to serve it as it was trained.

They are those of the model that it was trained from. What programs would miss is added: the chat
template where they look for it, in chat_template.jinja or in tokenizer_config.json, and the tokens
at which to stop, among them the one with which the template ends a turn of the assistant.
"""

from pathlib import Path
from typing import Any

from fedsim.data import (
    TEMPLATE,
    ChatTokenizer,
    Tokenizer,
    named_tokens,
    template_beside,
    template_of,
)
from fedsim.errors import BadChat, DataError
from fedsim.files import read_object, write_json
from fedsim.models.model_files import GENERATION, SETTINGS, SPECIAL, TOKENIZER


def complete(directory: Path) -> None:
    """Complete the side files in the directory of a new model. Complete files keep their bytes.

    Raises:
      ConfigError: a file is damaged.
    """
    file = directory / TOKENIZER
    if not file.is_file():
        return
    tokenizer = Tokenizer.load(file)
    settings = _read(directory / SETTINGS) or _about(tokenizer)
    if (template := template_beside(file)) is not None:
        settings = {
            **settings,
            "chat_template": _templates(settings.get("chat_template"), template),
        }
        if not (directory / TEMPLATE).is_file():
            (directory / TEMPLATE).write_text(template, encoding="utf-8")
    _write(directory / SETTINGS, settings)
    if not (directory / SPECIAL).is_file():
        _write(directory / SPECIAL, named_tokens(file))
    fields = _read(directory / GENERATION)
    stored = fields.get("eos_token_id")
    ids = stored if isinstance(stored, list) else [] if stored is None else [stored]
    if not fields:
        fields = {"bos_token_id": tokenizer.begin_id, "pad_token_id": tokenizer.end_id}
    wanted = [tokenizer.end_id, *sorted(tokenizer.end_ids), *_turn_end(tokenizer)]
    if missing := [number for number in dict.fromkeys(wanted) if number not in ids]:
        _write(directory / GENERATION, {**fields, "eos_token_id": [*ids, *missing]})


def _about(tokenizer: Tokenizer) -> dict[str, Any]:
    """Fields that make `transformers` read tokenizer.json unchanged, not by the kind of model."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.begin,
        "eos_token": tokenizer.end,
        "pad_token": tokenizer.end,
        "clean_up_tokenization_spaces": False,
    }


def _templates(stored: Any, template: str) -> Any:
    """The templates of tokenizer_config.json, a text or a list, with this one as the default."""
    if not isinstance(stored, list):
        return template
    others = [each for each in stored if isinstance(each, dict) and each.get("name") != "default"]
    if len(others) + 1 == len(stored) and {"name": "default", "template": template} in stored:
        return stored
    return [{"name": "default", "template": template}, *others]


def _turn_end(tokenizer: Tokenizer) -> list[int]:
    """The token that ends a turn of the assistant, if a template writes one."""
    try:
        end = ChatTokenizer(tokenizer, template_of(tokenizer)).end_of_turn()
    except (BadChat, DataError):  # no template, or one that shows chats in another way
        return []
    return [] if end is None else [end]


def _read(file: Path) -> dict[str, Any]:
    return read_object(file, "model") if file.is_file() else {}


def _write(file: Path, fields: dict[str, Any]) -> None:
    """Write a file unless it has these fields."""
    if fields != _read(file):
        write_json(file, fields)
