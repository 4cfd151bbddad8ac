"""When URLs are the same, and which hosts they are of and below."""

import re
from functools import lru_cache

from fedsim.data.building.user_ids import address_of, clean_host, host_of, split_url

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
