"""Whose a URL is."""

import pytest

from fedsim.data.building.user_ids import list_version, registrable_domain


@pytest.mark.parametrize(
    "url, owner",
    [
        ("http://news.bbc.co.uk/a/b", "bbc.co.uk"),
        ("https://USER:pw@Www.Example.COM.:8080/p?q=1#f", "example.com"),
        ("foo.github.io", "foo.github.io"),  # a customer of github.io is a user
        ("//cdn.example.org/x", "example.org"),
        ("http://192.168.1.1/x", "192.168.1.1"),
        ("http://[2001:DB8::1]:80/", "2001:db8::1"),
        ("https://bücher.example.de/", "example.de"),
        ("https://www.bücher.de/", "xn--bcher-kva.de"),
        ("http://localhost:80/", None),
        ("com", None),
        ("http://co.uk/", None),
        ("", None),
        (None, None),
        ("http://[broken", None),
        ("b.org/q?u=http://a.org/", "b.org"),  # an address in an address
        ("b.org//x", "b.org"),
        ("b.org:80/#//a.org", "b.org"),
        ("\0ht\ntp://b.org/", "b.org"),  # browsers leave such characters out
        ("http:///x", None),
        ("https://straße.de/", "xn--strae-oqa.de"),  # strasse.de is somebody else
        ("https://www.STRAẞE.de./", "xn--strae-oqa.de"),
        ("Οδός.gr", "xn--pxavk3b.gr"),
        (f"{'ß' * 70}.de", None),
    ],
)
def test_the_owner_of_a_url_is_its_registrable_domain(url, owner):
    assert registrable_domain(url) == owner


def test_the_version_of_the_list_is_known():
    assert list_version().startswith("publicsuffixlist 1.")
