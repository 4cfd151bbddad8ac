"""When two URLs are one, and which hosts a host is below."""

import pytest

from experiments.data.urls import normal_url


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
