"""The certificate of `fedsim forget`: a signed JSON file, and a page of the same content.

People are named by keyed digests, whose key is that of the ledger of the data: its owner can show
that a person is among them, and nobody else can try ids. The signature is Ed25519, by a key that
follows from the same secret. The file has one form: any other byte breaks the signature.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedsim.data import SUMS, Dataset, sums
from fedsim.errors import FedsimError
from fedsim.files import make_place, read_object, sync_directory, write_atomically
from fedsim.keys import FILE as KEY, SecretKey
from fedsim.trust.evidence import MALFORMED, Check, Unknown, Violated, demand
from fedsim.trust.pages import as_html, as_markdown

KIND, FORMAT = "fedsim certificate of forgetting", 5
TEMPLATE, TITLE = "forgotten.md.jinja", "Certificate of forgetting"


def signer(key: SecretKey) -> Ed25519PrivateKey:
    """The signing key of the owner of the data. Args: key: of the ledger of the data."""
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key.seal("certificate signer")))


def digests(people: Iterable[str], key: SecretKey) -> list[str]:
    """Keyed digests of people's ids, sorted, so that their order says nothing."""
    return sorted(key.seal(f"certificate person {each}") for each in people)


def digest_of(data: Dataset) -> str:
    """sha256 of the sums of a built directory, which cover every file of it."""
    assert data.path is not None, "of a directory"
    path = data.path / SUMS
    listed = path.read_bytes() if path.is_file() else sums(data.path, data.splits()).encode()
    return hashlib.sha256(listed).hexdigest()


def sealed(data: Dataset, key: SecretKey) -> str:
    """Keyed digest of a built directory, by the key of the ledger: an open one would confirm a
    guess of its texts."""
    return key.seal(f"certificate data {digest_of(data)}")


def aside(path: Path) -> Path:
    """The hidden directory where a certificate waits until what it says is done."""
    return path.with_name(f".{path.name}.signed")


def sign(path: Path, record: dict[str, Any], key: SecretKey) -> None:
    """Sign a certificate and its page, and keep them aside until `issue`.

    Args:
      path: the JSON file; the page has its name, with .html and .md.
      record: all but the public key and the signature.
      key: of the ledger of the data.
    """
    private = signer(key)
    record = json.loads(json.dumps(record, sort_keys=True))  # as whoever reads the file has it
    whole = {**record, "public_key": private.public_key().public_bytes_raw().hex()}
    whole["signature"] = private.sign(_signed(whole)).hex()
    make_place(place := aside(path))
    for page, text in (_pages(path, whole) | {path: _file(whole)}).items():
        write_atomically(place / page.name, text)


def issue(path: Path) -> dict[str, str]:
    """Put a signed certificate in its place, the JSON file last.

    Returns:
      The paths, as "certificate", "html" and "markdown".
    """
    names = {"html": ".html", "markdown": ".md", "certificate": ".json"}
    paths = {name: path.with_suffix(suffix) for name, suffix in names.items()}
    for page in paths.values():
        if (file := aside(path) / page.name).exists():  # else it was moved before a kill
            file.replace(page)
    sync_directory(path.parent)
    aside(path).rmdir()
    return {name: str(page) for name, page in paths.items()}


def waiting(path: Path, target: Path, place: Path) -> dict[str, Any] | None:
    """The signed certificate that was to be issued when a process was killed, if the data that it
    is about are in their place; else None.

    Args:
      path: where it is issued.
      target: the place of the data.
      place: directory of the ledger of the data.
    """
    try:
        record = read(aside(path) / path.name)
        same = _is_after(record, Dataset.open(target), place)
    except (FedsimError, OSError):
        return None
    return record if same else None


def check(path: Path, data: str | None, place: Path, *, theirs: bool = False) -> list[Check]:
    """Check a certificate.

    Args:
      path: the JSON file.
      data: the data without the people's texts; None: they are not looked at.
      place: directory of the ledger of the data.
      theirs: it is known to be that ledger: a certificate by another key is forged.
    """
    try:
        record = read(path)
    except FedsimError as error:
        return [Check("signature", False, str(error))]
    found = f"not a byte changed since {record['time']}"
    looks = {"signer": lambda: _signer(record, place, theirs), "page": lambda: _page(path, record)}
    looks["data"] = lambda: _data(record, data, place)
    checks = [Check("signature", True, found)]
    for promise, look in looks.items():
        try:
            checks.append(Check(promise, True, look()))
        except Unknown as error:
            checks.append(Check(promise, None, str(error)))
        except (FedsimError, OSError) as error:
            checks.append(Check(promise, False, str(error)))
    return checks


def read(path: Path) -> dict[str, Any]:
    """The certificate in a file. Raises: Violated: it is none, or was changed."""
    from jinja2 import TemplateError

    record = read_object(path, "certificate")
    known = record.get("kind") == KIND and record.get("format") == FORMAT
    demand(known, f"{path}: expected a certificate of `fedsim forget`")
    changed = f"{path}: was changed since it was signed"
    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(record["public_key"]))
        public.verify(bytes.fromhex(record["signature"]), _signed(record))
    except (InvalidSignature, KeyError, TypeError, ValueError):
        raise Violated(changed) from None
    demand(path.read_bytes() == _file(record), changed)
    try:
        as_markdown(TEMPLATE, title=TITLE, record=record)
        whole = isinstance(record["data"]["after"], str)
    except (*MALFORMED, TemplateError) as error:
        raise Violated(f"{path}: expected all that a certificate says ({error})") from None
    demand(whole, f"{path}: expected the digest of the data")
    return record


def _signed(record: dict[str, Any]) -> bytes:
    kept = {name: value for name, value in record.items() if name != "signature"}
    return f"{KIND}\n{json.dumps(kept, sort_keys=True, separators=(',', ':'))}".encode()


def _file(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()


def _pages(path: Path, record: dict[str, Any]) -> dict[Path, bytes]:
    facts = {"title": TITLE, "record": record}
    made = {".html": as_html(TEMPLATE, **facts), ".md": as_markdown(TEMPLATE, **facts)}
    return {path.with_suffix(suffix): text.encode() for suffix, text in made.items()}


def _signer(record: dict[str, Any], place: Path, theirs: bool) -> str:
    """The key of the ledger on this machine signed."""
    if (ours := _public_key(place)) is None:
        here = "is not here, or others may not read it"
        raise Unknown(f"the ledger of the data {here}: compare key {record['public_key']}")
    if ours != record["public_key"]:
        demand(not theirs, f"{place}: signed by another key, {record['public_key']}")
        raise Unknown(f"another ledger's: compare key {record['public_key']}")
    return f"by the key of the ledger of the data, {ours}"


def _public_key(place: Path) -> str | None:
    """That of the ledger on this machine, in hex; None if it is not here or cannot be read."""
    if not os.access(place / KEY, os.R_OK):
        return None
    return signer(SecretKey.load(place)).public_key().public_bytes_raw().hex()


def _page(path: Path, record: dict[str, Any]) -> str:
    """The pages beside the certificate say what it says."""
    pages = {page: text for page, text in _pages(path, record).items() if page.exists()}
    if not pages:
        raise Unknown("no page is beside it")
    for page, text in pages.items():
        demand(page.read_bytes() == text, f"{page}: says something else than the certificate")
    return f"{', '.join(page.name for page in pages)}: the same content"


def _is_after(record: dict[str, Any], data: Dataset, place: Path) -> bool:
    """Whether data are those that a certificate leaves. Args: place: of the ledger of the data."""
    return sealed(data, SecretKey.load(place)) == record["data"]["after"]


def _data(record: dict[str, Any], source: str | None, place: Path) -> str:
    """The data are those that the certificate is about, read to the last byte."""
    if source is None:
        raise Unknown("say with --data where the data are")
    data = Dataset.open(source)
    if _public_key(place) != record["public_key"]:
        raise Unknown("only the key of the ledger of the data can tell")
    for store in data.splits().values():
        store.check()
    same = _is_after(record, data, place)
    demand(same, f"data={source}: others than those of the certificate")
    return f"data={source}: as they were when their people were forgotten"
