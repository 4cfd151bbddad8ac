"""Whose a URL is: its registrable domain, by the public suffix list.

The list is the one bundled with `publicsuffixlist`, private section included: customers of
github.io are separate users. Another version of it is another partition of the same data, hence
another privacy unit, so its version is recorded.
"""

import ipaddress
import re
from encodings.idna import nameprep
from functools import cache, lru_cache
from importlib.metadata import version
from urllib.parse import SplitResult, urlsplit

from publicsuffixlist import PublicSuffixList

WITH_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
INVISIBLE = "".join(map(chr, range(33)))  # what browsers leave out around a URL
LEFT_OUT = str.maketrans("", "", "\t\r\n")  # and in it
# Python's codec, of IDNA 2003, takes straße.de for strasse.de, which is another registrant's.
LETTERS_OF_THEIR_OWN, DOTS = re.compile("([ßς])"), re.compile("[.\u3002\uff0e\uff61]")
LABEL_BYTES = 63


def list_version() -> str:
    """The version of the public suffix list."""
    return f"publicsuffixlist {version('publicsuffixlist')}"


def host_of(url: str | None) -> str | None:
    """The host in lower case and punycode, without port, user or trailing dot; None if none."""
    try:
        host = split_url(url).hostname
    except ValueError:
        return None
    return clean_host(host) if host else None


def split_url(url: str | None) -> SplitResult:
    """The parts of a URL, which may have no scheme; it may have another URL in it, with one."""
    url = (url or "").strip().strip(INVISIBLE).translate(LEFT_OUT)
    return urlsplit(url if WITH_SCHEME.match(url) else f"//{url}")


def registrable_domain(url: str | None) -> str | None:
    """The domain that someone registered, such as bbc.co.uk; an IP address is its own owner.

    None where nobody can be named: no host, localhost, a bare public suffix such as com.
    """
    host = host_of(url)
    return _owner(host) if host else None


@lru_cache(2**16)
def clean_host(host: str) -> str | None:
    """A host in lower case and punycode, without trailing dots; None if it cannot be one."""
    host = host.lower()
    try:
        return (host if host.isascii() else _punycode(host)).rstrip(".")
    except UnicodeError:
        return None


def _punycode(host: str) -> str:
    """Raises: UnicodeError: it is no name of a host."""
    if not LETTERS_OF_THEIR_OWN.search(host):
        return host.encode("idna").decode()
    return ".".join(map(_label, DOTS.split(host)))


def _label(label: str) -> str:
    if not LETTERS_OF_THEIR_OWN.search(label):
        return label.encode("idna").decode()
    pieces = LETTERS_OF_THEIR_OWN.split(label)  # every other one is such a letter
    pieces[::2] = map(nameprep, pieces[::2])
    found = f"xn--{''.join(pieces).encode('punycode').decode()}"
    if len(found) > LABEL_BYTES:
        raise UnicodeError("the label is too long")
    return found


def address_of(host: str) -> str | None:
    """The address that a host is, in its shortest form; None if it is a name."""
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return None


@lru_cache(2**16)
def _owner(host: str) -> str | None:
    return address_of(host) or _suffixes().privatesuffix(host)


@cache
def _suffixes() -> PublicSuffixList:
    return PublicSuffixList()
