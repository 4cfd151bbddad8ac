"""Files of a model beside its weights, which training does not change: tokenizer, chat template,
generation settings. Whoever serves the trained model needs them as they were.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from fedsim.errors import ConfigError, FileDamaged
from fedsim.files import MOST_JSON, write_atomically

CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"
NAMES = (
    *(CONFIG, "generation_config.json", TOKENIZER, SETTINGS, "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "tokenizer.model", "spiece.model"),
)
TEMPLATES = "additional_chat_templates"
PATTERNS = (*NAMES, f"{TEMPLATES}/*.jinja")


def names_in(directory: Path) -> list[str]:
    """The names of those files that are there.

    Raises: ConfigError: one is larger than MOST_JSON.
    """
    more = (f"{TEMPLATES}/{path.name}" for path in directory.glob(f"{TEMPLATES}/*.jinja"))
    names = [name for name in (*NAMES, *sorted(more)) if (directory / name).is_file()]
    for name in names:
        size = (directory / name).stat().st_size
        if size > MOST_JSON:
            expected = f"at most {MOST_JSON} bytes, got {size}"
            raise ConfigError.of("model", directory / name, expected)
    return names


def digests(directory: Path) -> dict[str, str]:
    """sha256 of each of the files that are there."""
    return {name: _sha256(directory / name) for name in names_in(directory)}


def check(directory: Path, expected: Mapping[str, str]) -> None:
    """Raises FileDamaged: a file is not what `digests` had found."""
    for name, sha256 in expected.items():
        path = directory / name
        if not path.is_file() or _sha256(path) != sha256:
            raise FileDamaged(f"{path}: was changed since the run was started")


def copy(directory: Path, out: Path, but: tuple[str, ...] = ()) -> list[str]:
    """Copy those that are there, except `but`, into the directory `out`. Returns their names."""
    names = [name for name in names_in(directory) if name not in but]
    for name in names:
        (out / name).parent.mkdir(exist_ok=True)
        write_atomically(out / name, (directory / name).read_bytes())
    return names


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
