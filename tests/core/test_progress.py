"""Optional progress: items are counted in strides, and only if the count is shown."""

from __future__ import annotations

import pytest

from kvcore.errors import InputError, shorten
from kvcore.files import make_directory
from kvcore.progress import STRIDE, silent, ticked, unseen


def test_every_item_is_counted():
    """`ticked` reports one tick for each full stride, and one for the rest."""
    ticks = []
    assert list(ticked(range(2 * STRIDE + 3), ticks.append)) == list(range(2 * STRIDE + 3))
    assert ticks == [STRIDE, STRIDE, 3]


class Located(list):
    """Items with the number of bytes of their file that were read."""

    position = 0

    def __iter__(self):
        """Yield the items, 10 bytes each, read in pieces of 4,000 bytes."""
        for index, item in enumerate(super().__iter__(), 1):
            self.position = -(-index // 400) * 4000
            yield item


def test_items_of_a_file_are_counted_in_bytes():
    """Items that have a `position` in a file are counted in bytes, after the same strides."""
    ticks = []
    items = Located(range(STRIDE + 400))
    assert list(ticked(items, ticks.append)) == list(items)
    assert ticks == [4000, 4000, 0]


def test_items_are_not_counted_with_a_silent_tick():
    """With the silent `Tick`, `ticked` returns the items themselves."""
    items = range(3)
    with silent("counting", 3) as tick:
        assert tick is unseen
        assert tick(2) is None
        assert ticked(items, tick) is items


@pytest.mark.parametrize(
    ("text", "most", "short"), [("abcdef", 6, "abcdef"), ("abcdefg", 6, "abc...")]
)
def test_long_texts_are_shortened(text, most, short):
    """`shorten` cuts a text that is longer than the limit, and marks the cut with dots."""
    assert shorten(text, most) == short


def test_make_directory_makes_parent_directories(tmp_path):
    """`make_directory` makes parents and keeps an existing directory; a file is an error."""
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file: cannot be made a directory: it is a file"):
        make_directory(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be made a directory: Not a directory"):
        make_directory(tmp_path / "file" / "a")
