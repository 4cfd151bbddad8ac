"""When URLs are the same, and which hosts they are of and below."""

import ipaddress
import re
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

PORTS = {"http": 80, "https": 443}


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


@lru_cache(2**16)
def clean_host(host: str) -> str | None:
    """A host in lower case and punycode, without trailing dots; None if it is not a valid name."""
    host = host.lower()
    try:
        return (host if host.isascii() else host.encode("idna").decode()).rstrip(".")
    except UnicodeError:
        return None


def address_of(host: str) -> str | None:
    """The shortest form of a host that is an IP address; None for a name."""
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return None
