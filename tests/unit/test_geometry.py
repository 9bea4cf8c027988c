"""How a prompt lies in blocks: both countings, keys coarser and finer than a block."""

import pytest

from kvcore import InputError, Request
from kvcore.cache.hints import priority_steps
from kvcore.cache.layout import BlockLayout
from kvcore.request import Retention


def request(prompt, keys, key_tokens, **fields):
    """Return a request of so many tokens with those keys."""
    return Request(id=7, prompt_tokens=prompt, keys=keys, key_tokens=key_tokens, **fields)


def layout(geometry, request):
    """Return (tokens, blocks, cacheable, lookup, limit) of a request."""
    return geometry.prompt(request)[1:]


def test_fifty_tokens_in_blocks_of_sixteen():
    """A 50-token prefix at block 16 occupies 4 blocks, 3 of them cacheable."""
    assert layout(BlockLayout("tokens", 16, 16), request(50, "abcd", 16)) == (50, 4, 3, 3, 3)


def test_the_last_token_is_always_computed():
    """A prompt of 48 full tokens has 3 cacheable blocks, of which only 2 can hit."""
    assert layout(BlockLayout("tokens", 16, 16), request(48, "abc", 16)) == (48, 3, 3, 3, 2)


@pytest.mark.parametrize(("tokens", "limit"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_hit_limit(tokens, limit):
    """At most (L - 1) // b blocks hit."""
    assert layout(BlockLayout("tokens", 16, 16), request(tokens, "abc", 16))[-1] == limit


def test_an_empty_prompt_has_no_blocks():
    """Nothing is occupied, looked up or hit."""
    assert layout(BlockLayout("tokens", 16, 16), request(0, "", 16)) == (0, 0, 0, 0, 0)


def test_blocks_without_keys_are_not_cacheable():
    """A prompt with fewer keys than blocks looks up, and may share, only those with one."""
    assert layout(BlockLayout("tokens", 16, 16), request(100, "ab", 16)) == (100, 7, 2, 2, 2)


def test_coarse_keys_cover_several_blocks():
    """Keys of 48 tokens at block 16: the third, partial key covers one full block."""
    geometry = BlockLayout("tokens", 16, 48)
    assert geometry.ratio == 3
    assert layout(geometry, request(120, "abc", 48)) == (120, 8, 7, 7, 7)


def test_a_block_of_several_keys_has_the_key_of_its_last_part():
    """Keys of 4 tokens at block 16: block j has key 4·j + 3."""
    geometry = BlockLayout("tokens", 16, 4)
    keys, *rest = geometry.prompt(request(39, "abcdefghij", 4))
    assert list(keys) == ["d", "h"]
    assert rest == [39, 3, 2, 2, 2]


def test_keys_counting_ignores_lengths():
    """Every key is a unit: a full match is a full hit, whatever the prompt's length."""
    assert layout(BlockLayout("keys", 16, 16), request(50, "abcd", 16)) == (64, 4, 4, 4, 4)


def test_keys_counting_divides_keys_into_blocks():
    """With blocks of a third of a key there are exactly three times as many."""
    assert layout(BlockLayout("keys", 16, 48), request(50, "ab", 48)) == (96, 6, 6, 6, 6)


def test_output_keys_make_the_answer_cacheable():
    """Keys known beyond the prompt are cacheable, but neither looked up nor hit."""
    geometry = BlockLayout("tokens", 16, 16)
    keys, *rest = geometry.prompt(request(40, "abp", 16, output_keys="cd"))
    assert list(keys) == ["a", "b", "c", "d"]
    assert rest == [40, 3, 4, 2, 2]


def test_output_keys_in_blocks_of_several_keys():
    """Prompt and output keys form one chain, of which every m-th is a block's."""
    geometry = BlockLayout("tokens", 16, 8)
    keys, *rest = geometry.prompt(request(24, "abc", 8, output_keys="defgh"))
    assert list(keys) == ["b", "d", "f", "h"]
    assert rest == [24, 2, 4, 1, 1]


def test_output_keys_need_the_keys_before_them():
    """Without a key for every full block of the prompt they have no place: refused."""
    with pytest.raises(InputError, match="request 7 has output keys, but only 1 of 2 keys"):
        BlockLayout("tokens", 16, 16).prompt(request(40, "a", 16, output_keys="c"))


def test_keys_of_another_size_are_refused():
    """The error names the request and both sizes."""
    with pytest.raises(InputError, match=r"request 7 .* 32 tokens.*key_tokens=16"):
        BlockLayout("tokens", 16, 16).prompt(request(50, "ab", 32))


@pytest.mark.parametrize(("block", "key"), [(16, 24), (24, 16), (5, 7)])
@pytest.mark.parametrize("count", ["keys", "tokens"])
def test_sizes_that_do_not_divide_are_refused(count, block, key):
    """Neither divides the other: the error names both."""
    with pytest.raises(InputError, match=rf"block size {block} .* {key} tokens.*divide"):
        BlockLayout(count, block, key)


def test_keys_counting_refuses_blocks_of_several_keys():
    """A unit cannot be part of a block: the error names both sizes."""
    with pytest.raises(InputError, match=r"block size 32 is larger .* 16 tokens"):
        BlockLayout("keys", 32, 16)


def test_an_unknown_counting_is_refused():
    """The error lists the two there are."""
    with pytest.raises(InputError, match="'blocks' is not known; there are: keys, tokens"):
        BlockLayout("blocks", 16, 16)


@pytest.mark.parametrize(("block", "key"), [(0, 16), (16, 0), (-1, 16)])
def test_sizes_must_be_positive(block, key):
    """The error names both."""
    with pytest.raises(InputError, match=f"block size {block} and key size {key}"):
        BlockLayout("tokens", block, key)


def hinted(*hints, prompt=64):
    """Return the steps of a prompt with `hints`, in blocks of 16."""
    return priority_steps(request(prompt, "abcd", 16, retention=hints), 16)


def test_no_hints_no_steps():
    """Without hints the default holds everywhere."""
    assert hinted() == []


def test_a_hint_covers_the_blocks_it_touches():
    """Tokens 20 to 40 touch blocks 1 and 2; before them the default holds."""
    assert hinted(Retention(20, 40, 80, 5)) == [(1, 35, None), (3, 80, 5)]


def test_a_hint_without_end_reaches_the_end_of_the_prompt():
    """`end=None` ends with the prompt's last block, full or not."""
    assert hinted(Retention(16, None, 80), prompt=50) == [(1, 35, None), (4, 80, None)]


def test_where_hints_overlap_the_highest_priority_holds():
    """A block takes the highest of the priorities that touch it."""
    steps = hinted(Retention(0, 48, 20), Retention(16, 32, 90))
    assert steps == [(1, 20, None), (2, 90, None), (3, 20, None)]


def test_of_equal_priorities_the_longest_duration_holds():
    """For good is longer than any duration."""
    steps = hinted(Retention(0, 16, 80, 5), Retention(0, 32, 80, 9), Retention(0, 48, 80))
    assert steps[0] == (1, 80, None)
    assert hinted(Retention(0, 16, 80, 5), Retention(0, 16, 80, 9)) == [(1, 80, 9)]
