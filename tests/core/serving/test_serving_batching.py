"""`Batching`: the limits of a step that are refused, and the blocks of the watermark."""

import pytest

from kvcore import InputError
from kvcore.serving import Batching


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 255}, "max_tokens=255 and max_seqs=256: .* no fewer tokens"),
        ({"max_seqs": 2.5}, r"max_tokens=8192 and max_seqs=2\.5: give whole numbers"),
        ({"max_tokens": "8192"}, "max_tokens='8192' and max_seqs=256: give whole numbers"),
        ({"chunked": "no"}, "chunked='no' must be True or False"),
        ({"steps": "decode-first"}, "steps='decode-first' is not known; there are: mixed, pre"),
        ({"watermark": 1}, "watermark=1: give a share of blocks, 0 or more, below 1"),
        ({"watermark": "1%"}, "watermark='1%': give a share of blocks, 0 or more, below 1"),
        ({"watermark": None}, "watermark=None: give a share"),
    ],
)
def test_impossible_limits_are_refused(options, message):
    """The error for an impossible limit has its value and the accepted values."""
    with pytest.raises(InputError, match=message):
        Batching(**options)


@pytest.mark.parametrize(
    ("watermark", "blocks", "reserved"),
    [(0, 100, 0), (0.01, 100, 1), (0.01, 101, 2), (0.5, 7, 4)],
)
def test_the_watermark_reserves_whole_blocks(watermark, blocks, reserved):
    """A watermark reserves whole blocks, rounded up."""
    assert Batching(watermark=watermark).reserved_blocks(blocks) == reserved


@pytest.mark.parametrize(
    ("own", "other", "longest"),
    [(None, None, None), (1, None, 1), (None, 9, 9), (8, 9, 8), (9, 9, 9), (10, 9, 9)],
)
def test_the_lower_of_two_limits_of_a_sequence_holds(own, other, longest):
    """A sequence is no longer than `max_model_len`, nor than the positions of its model."""
    assert Batching(max_model_len=own).within(other).max_model_len == longest


def test_a_limit_that_there_is_not_is_named():
    """The error has the name that was given, and those that there are."""
    with pytest.raises(TypeError, match=r"no limit 'max_seq' .*'max_seqs'.*: give one of \("):
        Batching(max_seq=3)
