"""When two URLs are one."""

import pytest

from experiments.data.urls import normal_url


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("http://a.org/x", "https://A.org/x/", True),
        ("http://a.org:80/x#part", "http://a.org/x", True),
        ("https://a.org:443/", "a.org", True),
        ("http://a.org。/", "a.org", True),
        ("http://a.org/?u=http://b.org/", "a.org/?u=http://b.org/", True),
        ("http://a.org/x?q=1", "http://a.org/x?q=2", False),
        ("http://a.org:8080/", "http://a.org/", False),
        ("http://a.org/X", "http://a.org/x", False),
        ("http://www.a.org/", "http://a.org/", False),
        ("http://straße.de/", "http://strasse.de/", False),
    ],
)
def test_equal_urls(one, other, same):
    assert (normal_url(one) == normal_url(other)) == same
