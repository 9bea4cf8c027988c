"""The layout of prompts in blocks: both accountings, keys coarser and finer than blocks."""

import pytest

from kvcore import InputError, Request
from kvcore.cache.hints import priority_steps
from kvcore.cache.layout import BlockLayout
from kvcore.request import Retention


def request(prompt, keys, key_tokens, **fields):
    """Return a request of `prompt` tokens with `keys`."""
    return Request(id=7, prompt_tokens=prompt, keys=keys, key_tokens=key_tokens, **fields)


def layout(geometry, request):
    """Return (tokens, blocks, cacheable, lookup, limit) of a request."""
    return geometry.prompt(request)[1:]


@pytest.mark.parametrize(
    ("count", "key_tokens", "prompt", "keys", "counts"),
    [
        ("tokens", 16, 50, "abcd", (50, 4, 3, 3, 3)),
        ("tokens", 16, 48, "abc", (48, 3, 3, 3, 2)),
        ("tokens", 16, 0, "", (0, 0, 0, 0, 0)),
        ("tokens", 16, 100, "ab", (100, 7, 2, 2, 2)),
        ("keys", 16, 50, "abcd", (64, 4, 4, 4, 4)),
        ("keys", 48, 50, "ab", (96, 6, 6, 6, 6)),
    ],
    ids=["partial block", "last token", "empty", "no keys", "length of a key", "coarse keys"],
)
def test_the_layout_of_a_prompt_in_blocks_of_sixteen(count, key_tokens, prompt, keys, counts):
    """A prompt has the tokens and blocks of its accounting, and its last token is computed.

    Blocks without keys are neither looked up nor cacheable. In `keys` accounting a key is all
    of its tokens, whatever the length of the prompt.
    """
    geometry = BlockLayout(count, 16, key_tokens)
    assert layout(geometry, request(prompt, keys, key_tokens)) == counts


@pytest.mark.parametrize(("tokens", "limit"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_hit_limit_leaves_a_token_to_compute(tokens, limit):
    """At most (L - 1) // b blocks of a prompt of L tokens hit, for blocks of b tokens."""
    assert layout(BlockLayout("tokens", 16, 16), request(tokens, "abc", 16))[-1] == limit


def test_coarse_keys_cover_several_blocks():
    """With keys of 48 tokens and blocks of 16, a partial third key covers one full block."""
    geometry = BlockLayout("tokens", 16, 48)
    assert geometry.ratio == 3
    assert layout(geometry, request(120, "abc", 48)) == (120, 8, 7, 7, 7)


def test_a_block_of_several_keys_has_the_key_of_its_last_part():
    """With keys of 4 tokens and blocks of 16, block j has key 4·j + 3."""
    geometry = BlockLayout("tokens", 16, 4)
    keys, *rest = geometry.prompt(request(39, "abcdefghij", 4))
    assert list(keys) == ["d", "h"]
    assert rest == [39, 3, 2, 2, 2]


def test_output_keys_make_generated_blocks_cacheable():
    """Blocks with output keys are cacheable, but neither looked up nor hit."""
    geometry = BlockLayout("tokens", 16, 16)
    keys, *rest = geometry.prompt(request(40, "abp", 16, output_keys="cd"))
    assert list(keys) == ["a", "b", "c", "d"]
    assert rest == [40, 3, 4, 2, 2]


def test_output_keys_in_blocks_of_several_keys():
    """With m keys per block, every m-th key of prompt and output together is a block's key."""
    geometry = BlockLayout("tokens", 16, 8)
    keys, *rest = geometry.prompt(request(24, "abc", 8, output_keys="defgh"))
    assert list(keys) == ["b", "d", "f", "h"]
    assert rest == [24, 2, 4, 1, 1]


def test_output_keys_need_the_keys_before_them():
    """Output keys raise InputError if a full block of the prompt has no key."""
    with pytest.raises(InputError, match="request 7 has output keys, but only 1 of 2 keys"):
        BlockLayout("tokens", 16, 16).prompt(request(40, "a", 16, output_keys="c"))


def test_keys_of_another_size_are_refused():
    """Keys of another size raise InputError that names the request and both sizes."""
    with pytest.raises(InputError, match=r"request 7 .* 32 tokens.*key_tokens=16"):
        BlockLayout("tokens", 16, 16).prompt(request(50, "ab", 32))


@pytest.mark.parametrize(("block", "key"), [(16, 24), (24, 16), (5, 7)])
@pytest.mark.parametrize("count", ["keys", "tokens"])
def test_sizes_that_do_not_divide_are_refused(count, block, key):
    """Block and key sizes of which neither divides the other raise InputError with both."""
    with pytest.raises(InputError, match=rf"block size {block} .* {key} tokens.*divide"):
        BlockLayout(count, block, key)


def test_keys_accounting_refuses_blocks_of_several_keys():
    """In `keys` accounting a block larger than a key raises InputError with both sizes."""
    with pytest.raises(InputError, match=r"block size 32 is larger .* 16 tokens"):
        BlockLayout("keys", 32, 16)


def test_an_unknown_accounting_is_refused():
    """An unknown accounting raises InputError that lists the two known ones."""
    with pytest.raises(InputError, match="'blocks' is not known; there are: keys, tokens"):
        BlockLayout("blocks", 16, 16)


@pytest.mark.parametrize(("block", "key"), [(0, 16), (16, 0), (-1, 16)])
def test_sizes_must_be_positive(block, key):
    """A block or key size below 1 raises InputError with both sizes."""
    with pytest.raises(InputError, match=f"block size {block} and key size {key}"):
        BlockLayout("tokens", block, key)


def hinted(*hints, prompt=64):
    """Return the priority steps of a prompt with `hints`, in blocks of 16."""
    return priority_steps(request(prompt, "abcd", 16, retention=hints), 16)


def test_a_prompt_without_hints_has_no_priority_steps():
    """A prompt without hints has no priority steps."""
    assert hinted() == []


def test_a_hint_covers_the_blocks_it_touches():
    """A hint for tokens 20 to 40 covers blocks 1 and 2; block 0 has the default priority."""
    assert hinted(Retention(20, 40, 80, 5)) == [(1, 35, None), (3, 80, 5)]


def test_a_hint_without_end_reaches_the_end_of_the_prompt():
    """A hint with `end=None` covers the prompt's last block, even if it is not full."""
    assert hinted(Retention(16, None, 80), prompt=50) == [(1, 35, None), (4, 80, None)]


def test_the_highest_priority_of_overlapping_hints_holds():
    """A block has the highest priority of the hints that touch it."""
    steps = hinted(Retention(0, 48, 20), Retention(16, 32, 90))
    assert steps == [(1, 20, None), (2, 90, None), (3, 20, None)]


def test_the_longest_duration_of_equal_priorities_holds():
    """Of hints with equal priority the longest duration holds; no duration is the longest."""
    steps = hinted(Retention(0, 16, 80, 5), Retention(0, 32, 80, 9), Retention(0, 48, 80))
    assert steps[0] == (1, 80, None)
    assert hinted(Retention(0, 16, 80, 5), Retention(0, 16, 80, 9)) == [(1, 80, 9)]
