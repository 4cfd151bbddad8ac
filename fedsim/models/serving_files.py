"""Side files of a model: the tokenizer, the chat template and the generation settings.

Training does not change them, and programs that serve the trained model need them unchanged, so a
saved model has those of the model that it was trained from. The tokens at which to stop are added,
among them the one with which the template ends a turn of the assistant.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedsim.data import ChatTokenizer, Tokenizer, template_of
from fedsim.errors import BadChat, ConfigError, DataError, FileDamaged
from fedsim.files import MAX_JSON, read_object, sha256_of, write_atomically, write_json

CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
ADAPTER = "adapter_config.json"  # in place of CONFIG, where a directory has adapters alone
SIDE_FILES = (
    *(CONFIG, GENERATION, TOKENIZER, SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model"),
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
    for path in (directory / name for name in names):
        if (size := path.stat().st_size) > MAX_JSON:
            raise ConfigError.of("model", path, f"at most {MAX_JSON} bytes, got {size}")
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


def add_end_tokens(directory: Path) -> None:
    """Add to the files of a new model what programs need to know the ends of its texts.

    Raises:
      ConfigError: a file is damaged.
    """
    if not (directory / TOKENIZER).is_file():
        return
    tokenizer = Tokenizer.load(directory / TOKENIZER)
    if not (directory / SETTINGS).is_file():
        # `transformers` then reads tokenizer.json unchanged, not by the kind of model.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {"bos_token": tokenizer.begin, "eos_token": tokenizer.end}
        settings |= {"pad_token": tokenizer.end, "clean_up_tokenization_spaces": False}
        write_json(directory / SETTINGS, settings)
    file = directory / GENERATION
    fields = {"bos_token_id": tokenizer.begin_id, "pad_token_id": tokenizer.end_id}
    if file.is_file():
        fields = read_object(file, "model")
    stored = fields.get("eos_token_id")
    ids = stored if isinstance(stored, list) else [] if stored is None else [stored]
    ends: list[int | None] = [tokenizer.end_id, *sorted(tokenizer.end_ids)]
    with suppress(BadChat, DataError):  # no template, or one that shows chats in another way
        ends.append(ChatTokenizer(tokenizer, template_of(tokenizer)).end_of_turn())
    if missing := [end for end in dict.fromkeys(ends) if end is not None and end not in ids]:
        write_json(file, {**fields, "eos_token_id": [*ids, *missing]})
