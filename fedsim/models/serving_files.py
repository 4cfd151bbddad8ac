"""Side files of a model: the tokenizer, the chat template and the generation settings.

Training does not change them, and programs that serve the trained model need them unchanged, so a
saved model has those of the model that it was trained from. What programs would miss is added: the
chat template where they look for it, in chat_template.jinja or in tokenizer_config.json, and the
tokens at which to stop, among them the one with which the template ends a turn of the assistant.
"""

from collections.abc import Mapping
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
from fedsim.errors import BadChat, ConfigError, DataError, FileDamaged
from fedsim.files import MAX_JSON, read_object, sha256_of, write_atomically, write_json

CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION, SPECIAL = "generation_config.json", "special_tokens_map.json"
ADAPTER = "adapter_config.json"  # in place of CONFIG, where a directory has adapters alone
SIDE_FILES = (
    *(CONFIG, GENERATION, TOKENIZER, SETTINGS, SPECIAL),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "tokenizer.model", "spiece.model"),
)
TEMPLATES = "additional_chat_templates"
PATTERNS = (*SIDE_FILES, f"{TEMPLATES}/*.jinja")


def side_files(directory: Path) -> list[str]:
    """Names of the side files in a directory.

    Raises:
      ConfigError: a file is larger than MAX_JSON.
    """
    more = (f"{TEMPLATES}/{path.name}" for path in directory.glob(f"{TEMPLATES}/*.jinja"))
    names = [name for name in (*SIDE_FILES, *sorted(more)) if (directory / name).is_file()]
    for name in names:
        size = (directory / name).stat().st_size
        if size > MAX_JSON:
            expected = f"at most {MAX_JSON} bytes, got {size}"
            raise ConfigError.of("model", directory / name, expected)
    return names


def side_file_digests(directory: Path) -> dict[str, str]:
    """sha256 (hex) of each side file in a directory."""
    return {name: sha256_of(directory / name) for name in side_files(directory)}


def check_side_files(directory: Path, expected: Mapping[str, str]) -> None:
    """Compare side files with the result of `side_file_digests`.

    Raises:
      FileDamaged: a file is missing or was changed.
    """
    for name, sha256 in expected.items():
        path = directory / name
        if not path.is_file() or sha256_of(path) != sha256:
            raise FileDamaged(f"{path}: was changed since the run was started")


def copy_side_files(directory: Path, out: Path, but: tuple[str, ...] = ()) -> list[str]:
    """Copy side files, except `but`, into the directory `out`. Returns: their names."""
    names = [name for name in side_files(directory) if name not in but]
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
        write_atomically(out / name, (directory / name).read_bytes())
    return names


def copy_missing(directory: Path) -> None:
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
