"""Data sets of the Hugging Face Hub: `hf:NAME` or `hf:NAME:CONFIG`, in the cache of its library.

The files of a split are those that README.md lists for the configuration. Without a list, a file
belongs to the split that its path names (train-00000.parquet, validation/part.jsonl), and where no
path names one, all files are "train"; a configuration is then a folder. The files are read as local
ones are: 007 is not 7.
"""

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fedsim.config import yaml_values
from fedsim.data.building.readers import is_known
from fedsim.data.building.sources import identify
from fedsim.errors import DataError, Interrupted, may_pass
from fedsim.files import DISK_FULL, expand_home

PREFIX, README, DEFAULT = "hf:", "README.md", "default"
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words of a path that name a split."""
KEYS = {"config_name", "data_files", "data_dir", "default", "description", "version"}
"""What README.md may say of a configuration; anything else would change how a file is read."""
ABOUT = re.compile(r"(dataset_infos?|dataset_dict|state|config)\.json", re.I)  # no rows
DIRECTLY = "download the files and build from them: `fedsim data build FILE ...`"


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hub, or a local directory in the format of one."""

    name: str
    config: str | None
    split: str
    revision: str | None

    @classmethod
    def parse(cls, source: str, split: str | None, revision: str | None) -> "HubSource":
        """Parse hf:NAME or hf:NAME:CONFIG. Default: split train, newest revision.

        Raises:
          DataError: NAME is empty.
        """
        name, _, config = source.removeprefix(PREFIX).partition(":")
        if not name:
            raise DataError.of("data", source, "hf:NAME or hf:NAME:CONFIG")
        name = expand_home("data", name)  # a local directory
        return cls(name, config or None, split or "train", revision)

    def __str__(self) -> str:
        config = f":{self.config}" if self.config else ""
        return f"{PREFIX}{self.name}{config}"

    def pinned(self) -> "HubSource":
        """The same data set at the commit that its revision names now."""
        if Path(self.name).exists() or re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            return self
        return replace(self, revision=self._info().sha)

    def identity(self) -> dict[str, Any]:
        """Identity of a pinned data set: its fields, and the digest of a local directory."""
        about, local = {**asdict(self), "source": str(self)}, Path(self.name)
        return {**identify(local), **about} if local.exists() else about

    def files(self) -> list[Path]:
        """The files of the split, by name, downloaded unless they are in the cache.

        Raises:
          DataError: there is no such configuration or split, or its files cannot be read.
          Interrupted: the Hub cannot be reached.
        """
        local = Path(self.name)
        if local.exists():
            names = [f.relative_to(local).as_posix() for f in local.rglob("*") if f.is_file()]
        else:
            names = [each.rfilename for each in self._info().siblings or ()]
        configs = _configs(self._download([README]) / README) if README in names else []
        names = sorted(name for name in names if not PurePosixPath(name).name.startswith("."))
        chosen = _of_config(names, configs, self)
        if unknown := [name for name in chosen if not is_known(Path(name))]:
            raise DataError.of("data", self, f"files that fedsim reads, found {unknown[0]}")
        kinds = {PurePosixPath(re.sub(r"\.(gz|zst)$", "", name)).suffix for name in chosen}
        if len(kinds) > 1:  # often the same rows twice
            found = " and ".join(sorted(kinds))
            raise DataError.of("data", self, f"files of one kind, found {found}; {DIRECTLY}")
        root = self._download(chosen)
        return [root / name for name in chosen]

    def _info(self) -> Any:
        return self._of_hub(lambda hub: hub.HfApi().dataset_info(self.name, revision=self.revision))

    def _download(self, names: Sequence[str]) -> Path:
        """Download some files. Returns: the directory that they are in."""
        if Path(self.name).exists():
            return Path(self.name)
        wanted = {"allow_patterns": [glob.escape(name) for name in names]}
        wanted |= {"repo_type": "dataset", "revision": self.revision}
        return Path(self._of_hub(lambda hub: hub.snapshot_download(self.name, **wanted)))

    def _of_hub(self, call: Callable[[Any], Any]) -> Any:
        """Call the Hub's library. Raises: DataError, or Interrupted if the network failed."""
        import huggingface_hub

        try:
            return call(huggingface_hub)
        except Exception as error:  # of many types
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            kind, expected = DataError, "a data set that can be downloaded"
            if may_pass(error):
                kind, expected = Interrupted, "to reach the Hugging Face Hub"
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            where = f"split {self.split}, revision {self.revision or 'newest'}"
            raise kind(f"data={self} ({where}): expected {expected} ({reason})") from error


def source_among(
    sources: Sequence[str | Path], split: str | None, revision: str | None
) -> HubSource | None:
    """The pinned data set of the Hub that is the one source; None if the sources are files.

    Raises:
      DataError: there are several sources, some of the Hub.
    """
    of_hub = [str(source) for source in sources if str(source).startswith(PREFIX)]
    if of_hub and len(sources) > 1:
        raise DataError.of("data", sources, "files, or one hf: data set")
    return HubSource.parse(of_hub[0], split, revision).pinned() if of_hub else None


def _configs(readme: Path) -> list[dict[str, Any]]:
    """The configurations that a README.md lists. Raises: DataError: they are damaged."""
    parts = re.split(r"^---\s*$", readme.read_text(encoding="utf-8"), maxsplit=2, flags=re.M)
    if len(parts) < 3 or parts[0].strip():
        return []
    try:
        return [dict(each) for each in (yaml_values(parts[1]) or {}).get("configs") or []]
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise DataError.of("data", readme, "a list of configurations in YAML") from None


def _of_config(
    names: Sequence[str], configs: Sequence[Mapping[str, Any]], source: HubSource
) -> list[str]:
    """Names of the files of a configuration's split. Raises: DataError: there are none."""
    known = {str(each.get("config_name", DEFAULT)): each for each in configs}
    default = [name for name, each in known.items() if each.get("default") == "true"]
    default += [DEFAULT] if DEFAULT in known else [*known] if len(known) == 1 else []
    config = source.config or next(iter(default), None)
    if known and config not in known:
        listed = ", ".join(sorted(known))
        raise DataError.of("data", source, f"{PREFIX}{source.name}:CONFIG, one of {listed}")
    about = known.get(str(config), {})
    if others := [f"{key}={value}" for key, value in about.items() if key not in KEYS]:
        raise DataError.of("data", source, f"files without {others[0]}; {DIRECTLY}")
    folder = str(about.get("data_dir") or ("" if known else source.config or "")).strip("/")
    prefix = f"{folder}/" if folder else ""
    if (listed := about.get("data_files")) is None:
        inside = [name for name in names if name.startswith(prefix)]
        of_split = _by_path([name for name in inside if is_known(Path(name))], prefix)
    else:
        of_split = _by_patterns(listed, names, prefix)
    if chosen := of_split.get(source.split):
        return chosen
    has = ", ".join(sorted(split for split, files in of_split.items() if files)) or "none"
    raise DataError.of("split", source.split, f"a split of {source} with files, it has: {has}")


def _by_patterns(listed: Any, names: Sequence[str], prefix: str) -> dict[str, list[str]]:
    """Files of each split, by the patterns that a configuration lists."""
    if isinstance(listed, list) and all(isinstance(each, dict) for each in listed):
        listed = {str(each.get("split")): each.get("path") for each in listed}
    listed = listed if isinstance(listed, dict) else {"train": listed}
    found = {}
    for split, patterns in listed.items():
        patterns = patterns if isinstance(patterns, list) else [patterns]
        matched = [_pattern(prefix + str(each).removeprefix("./")) for each in patterns]
        found[split] = [name for name in names if any(each.fullmatch(name) for each in matched)]
    return found


def _pattern(text: str) -> re.Pattern[str]:
    """The pattern of a glob in which ** alone crosses folders."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", text)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(part) or re.escape(part) for part in parts))


def _by_path(names: Sequence[str], prefix: str) -> dict[str, list[str]]:
    """Files of each split, by the words of their paths below `prefix`."""
    names = [name for name in names if not ABOUT.fullmatch(PurePosixPath(name).name)]
    found = {}
    for split, words in SPLITS.items():
        word = re.compile(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])")
        found[split] = [n for n in names if word.search(n.removeprefix(prefix).lower())]
    return found if any(found.values()) else {"train": [*names]}
