"""Whose a URL is: its registrable domain, by the public suffix list; and when URLs are the same.

The list is the one bundled with `publicsuffixlist`, private section included: customers of
github.io are separate users. Another version of it is another partition of the same data, hence
another privacy unit, so its version is recorded.
"""

import ipaddress
import re
from functools import cache, lru_cache
from importlib.metadata import version
from urllib.parse import urlsplit

from publicsuffixlist import PublicSuffixList

PORTS = {"http": 80, "https": 443}


def list_version() -> str:
    """The version of the public suffix list."""
    return f"publicsuffixlist {version('publicsuffixlist')}"


def host_of(url: str | None) -> str | None:
    """The host in lower case and punycode, without port, user or trailing dot; None if none."""
    url = (url or "").strip()
    try:
        host = urlsplit(url if "//" in url else f"//{url}").hostname
    except ValueError:
        return None
    return _clean(host) if host else None


def host_name(name: str) -> str | None:
    """A name of a host as `host_of` writes it; None if it is none, such as a URL."""
    host = _clean(name.strip()) or ""
    if _address(host) or re.fullmatch(r"[\w-]+(\.[\w-]+)*", host):
        return _above(host)[0]
    return None


def hosts_above(url: str | None) -> tuple[str, ...]:
    """The host of a URL and the domains that it is in: a.b.org, b.org, and org."""
    host = host_of(url)
    return _above(host) if host else ()


def registrable_domain(url: str | None) -> str | None:
    """The domain that someone registered, such as bbc.co.uk; an IP address is its own owner.

    None where nobody can be named: no host, localhost, a bare public suffix such as com.
    """
    host = host_of(url)
    return _owner(host) if host else None


def normal_url(url: str | None) -> str | None:
    """The URL without scheme, fragment, default port and trailing slash; the query is kept."""
    host = host_of(url)
    if host is None:
        return None
    url = (url or "").strip()
    parts = urlsplit(url if "//" in url else f"//{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    shown = f":{port}" if port not in (None, PORTS.get(parts.scheme, 80)) else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{host}{shown}{parts.path.rstrip('/')}{query}"


@lru_cache(2**16)
def _clean(host: str) -> str | None:
    host = host.lower()
    try:
        return (host if host.isascii() else host.encode("idna").decode()).rstrip(".")
    except UnicodeError:
        return None


@lru_cache(2**16)
def _above(host: str) -> tuple[str, ...]:
    if address := _address(host):
        return (address,)
    labels = host.split(".")
    return tuple(".".join(labels[i:]) for i in range(len(labels)))


def _address(host: str) -> str | None:
    try:
        return ipaddress.ip_address(host).compressed
    except ValueError:
        return None


@lru_cache(2**16)
def _owner(host: str) -> str | None:
    return _address(host) or _suffixes().privatesuffix(host)


@cache
def _suffixes() -> PublicSuffixList:
    return PublicSuffixList()
