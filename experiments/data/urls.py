"""When URLs are the same, which hosts they are of and below, and whose they are."""

import ipaddress
import re
from encodings.idna import nameprep
from functools import cache, lru_cache
from urllib.parse import SplitResult, urlsplit

from publicsuffixlist import PublicSuffixList

PORTS = {"http": 80, "https": 443}


def host_name(name: str) -> str | None:
    """A name of a host as `host_of` writes it; None if it is none, such as a URL."""
    host = clean_host(name.strip()) or ""
    if address_of(host) or re.fullmatch(r"[\w-]+(\.[\w-]+)*", host):
        return _above(host)[0]
    return None


def hosts_above(url: str | None) -> tuple[str, ...]:
    """The host of a URL and the domains that it is in: a.b.org, b.org, and org."""
    host = host_of(url)
    return _above(host) if host else ()


def normal_url(url: str | None) -> str | None:
    """The URL without scheme, fragment, default port and trailing slash; the query is kept."""
    host = host_of(url)
    if host is None:
        return None
    parts = split_url(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    shown = f":{port}" if port not in (None, PORTS.get(parts.scheme, 80)) else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{host}{shown}{parts.path.rstrip('/')}{query}"


@lru_cache(2**16)
def _above(host: str) -> tuple[str, ...]:
    if address := address_of(host):
        return (address,)
    labels = host.split(".")
    return tuple(".".join(labels[i:]) for i in range(len(labels)))


WITH_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
INVISIBLE = "".join(map(chr, range(33)))  # what browsers leave out around a URL
LEFT_OUT = str.maketrans("", "", "\t\r\n")  # and in it
# Python's codec, of IDNA 2003, takes straße.de for strasse.de, which is another registrant's.
LETTERS_OF_THEIR_OWN, DOTS = re.compile("([ßς])"), re.compile("[.\u3002\uff0e\uff61]")
LABEL_BYTES = 63


def host_of(url: str | None) -> str | None:
    """Host of a URL in lower case and punycode, without port, user and trailing dot."""
    try:
        host = split_url(url).hostname
    except ValueError:
        return None
    return clean_host(host) if host else None


def split_url(url: str | None) -> SplitResult:
    """Parts of a URL, which may have no scheme, and may contain another URL that has one."""
    url = (url or "").strip().strip(INVISIBLE).translate(LEFT_OUT)
    return urlsplit(url if WITH_SCHEME.match(url) else f"//{url}")


def registrable_domain(url: str | None) -> str | None:
    """Domain of a URL that someone registered, such as bbc.co.uk. An IP address is its own owner.

    Public suffixes are those of the list that `publicsuffixlist` bundles, private section included:
    customers of github.io are separate users.

    Returns:
      None if there is no owner: no host, localhost, a bare public suffix such as com.
    """
    host = host_of(url)
    return _owner(host) if host else None


@lru_cache(2**16)
def clean_host(host: str) -> str | None:
    """A host in lower case and punycode, without trailing dots; None if it is not a valid name."""
    host = host.lower()
    try:
        return (host if host.isascii() else _punycode(host)).rstrip(".")
    except UnicodeError:
        return None


def _punycode(host: str) -> str:
    """Encode a host with letters beyond ASCII. Raises: UnicodeError: the name is not valid."""
    if not LETTERS_OF_THEIR_OWN.search(host):
        return host.encode("idna").decode()
    return ".".join(map(_label, DOTS.split(host)))


def _label(label: str) -> str:
    if not LETTERS_OF_THEIR_OWN.search(label):
        return label.encode("idna").decode()
    pieces = LETTERS_OF_THEIR_OWN.split(label)  # every other one is such a letter
    pieces[::2] = map(nameprep, pieces[::2])
    encoded = f"xn--{''.join(pieces).encode('punycode').decode()}"
    if len(encoded) > LABEL_BYTES:
        raise UnicodeError("the label is too long")
    return encoded


def address_of(host: str) -> str | None:
    """The shortest form of a host that is an IP address; None for a name."""
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
