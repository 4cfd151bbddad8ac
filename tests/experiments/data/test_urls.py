"""When two URLs are one, and which hosts a host is below."""

import pytest

from experiments.data.urls import host_name, hosts_above, normal_url
from fedsim.data.building.user_ids import host_of


@pytest.mark.parametrize(
    "name, host",
    [
        ("Example.COM.", "example.com"),
        (" blog.example.com ", "blog.example.com"),
        ("bücher.de", "xn--bcher-kva.de"),
        ("bücher。de。", "xn--bcher-kva.de"),
        ("com", "com"),
        ("my_site.github.io", "my_site.github.io"),
        ("192.168.1.1", "192.168.1.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("https://example.com", None),
        ("example.com/", None),
        ("example.com:80", None),
        ("*.example.com", None),
        (".example.com", None),
        ("a..org", None),
        ("a b.org", None),
        ("", None),
        (".", None),
    ],
)
def test_names_of_hosts_are_those_of_urls(name, host):
    assert host_name(name) == host
    assert host is None or host_of(f"http://[{host}]" if ":" in host else host) == host


@pytest.mark.parametrize(
    "url, hosts",
    [
        ("https://me@Blog.Example.com.:80/x", ["blog.example.com", "example.com", "com"]),
        ("http://bücher.de", ["xn--bcher-kva.de", "de"]),
        ("http://192.168.1.1/x", ["192.168.1.1"]),
        ("http://[2001:DB8:0::1]/", ["2001:db8::1"]),
        ("localhost", ["localhost"]),
        (None, []),
    ],
)
def test_hosts_above_a_url(url, hosts):
    assert list(hosts_above(url)) == hosts


@pytest.mark.parametrize(
    "one, other",
    [
        ("http://a.org/x", "https://A.org/x/"),
        ("http://a.org:80/x#part", "http://a.org/x"),
        ("https://a.org:443/", "a.org"),
        ("http://a.org。/", "a.org"),
        ("http://a.org/?u=http://b.org/", "a.org/?u=http://b.org/"),
    ],
)
def test_equal_urls(one, other):
    assert normal_url(one) == normal_url(other)


@pytest.mark.parametrize(
    "one, other",
    [
        ("http://a.org/x?q=1", "http://a.org/x?q=2"),
        ("http://a.org:8080/", "http://a.org/"),
        ("http://a.org/X", "http://a.org/x"),
        ("http://www.a.org/", "http://a.org/"),
        ("http://straße.de/", "http://strasse.de/"),
    ],
)
def test_different_urls(one, other):
    assert normal_url(one) != normal_url(other)
