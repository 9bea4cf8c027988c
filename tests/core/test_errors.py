"""Messages: what they say of values, and what they never say."""

import pytest

from kvcore.errors import redact


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://me:SECRET@h/0?password=SECRET", "redis://***@h/0"),
        ("redis://:SECRET,SECRET@h/0", "redis://***@h/0"),
        ("redis://:SEC RET@h", "redis://***@h"),
        ("redis://:SEC@RET@h", "redis://***@h"),
        ("redis://:SEC?RET@h", "redis://***"),
        ("redis://h?password=SEC@RET", "redis://***"),
        ("http://h/x?password=SEC,RET", "http://h/x"),
        ("http://h/x?password=SEC RET", "http://h/x"),
    ],
)
def test_nothing_of_a_password_is_shown(url, shown):
    """Messages have nothing of a password, with whatever characters; options of a spec stay."""
    assert redact(url) == shown
    assert (
        redact(f"redis:memory=1GiB,url={url},ttl=9") == f"redis:memory=1GiB,url={shown},ttl=9"
    )
