"""The layout of prompts in blocks: both accountings, keys coarser and finer than blocks."""

import pytest

from kvcore import InputError, Request
from kvcore.cache.hints import priority_steps
from kvcore.cache.layout import GENERATED, BlockLayout
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


@pytest.mark.parametrize(
    ("key_tokens", "block_size", "keys", "blocks", "named"),
    [
        (4, 4, "abcde", (3, 6), "abc345"),
        (8, 4, "abc", (5, 9), "ab234"),
        (4, 8, "abcd", (2, 4), "bd23"),
    ],
    ids=["a block", "two blocks", "half a block"],
)
def test_generated_blocks_have_names_in_place_of_keys(
    key_tokens, block_size, keys, blocks, named
):
    """The keys of whole prompt blocks are continued by a name for each key of the others."""
    geometry = BlockLayout("tokens", block_size, key_tokens)
    expected = [(GENERATED, 7, int(key)) if key.isdigit() else key for key in named]
    assert geometry.generated_keys(request(99, keys, key_tokens), *blocks) == expected


@pytest.mark.parametrize(("tokens", "limit"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_hit_limit_leaves_a_token_to_compute(tokens, limit):
    """At most (L - 1) // b blocks of a prompt of L tokens hit, for blocks of b tokens."""
    assert layout(BlockLayout("tokens", 16, 16), request(tokens, "abc", 16))[-1] == limit


@pytest.mark.parametrize(
    ("key_tokens", "prompt", "keys", "output_keys", "block_keys", "counts"),
    [
        (48, 120, "abc", "", "abc", [120, 8, 7, 7, 7]),  # a partial third key
        (4, 39, "abcdefghij", "", "dh", [39, 3, 2, 2, 2]),  # block j has key 4·j + 3
        (16, 40, "abp", "cd", "abcd", [40, 3, 4, 2, 2]),  # neither looked up nor hit
        (8, 24, "abc", "defgh", "bdfh", [24, 2, 4, 1, 1]),
    ],
)
def test_blocks_have_the_keys_of_their_last_parts(
    key_tokens, prompt, keys, output_keys, block_keys, counts
):
    """A block of several keys has the last; generated blocks with keys are cacheable."""
    geometry = BlockLayout("tokens", 16, key_tokens)
    found, *rest = geometry.prompt(request(prompt, keys, key_tokens, output_keys=output_keys))
    assert ("".join(found), rest) == (block_keys, counts)


def test_output_keys_need_the_keys_before_them():
    """Output keys raise InputError if a full block of the prompt has no key."""
    with pytest.raises(InputError, match="request 7 has output keys, but only 1 of 2 keys"):
        BlockLayout("tokens", 16, 16).prompt(request(40, "a", 16, output_keys="c"))


def test_keys_of_another_size_are_refused():
    """Keys of another size raise InputError that names the request and both sizes."""
    with pytest.raises(InputError, match=r"request 7 .* 32 tokens.*key_tokens=16"):
        BlockLayout("tokens", 16, 16).prompt(request(50, "ab", 32))


@pytest.mark.parametrize(
    ("count", "block", "key", "message"),
    [
        ("keys", 16, 24, "block size 16 .* 24 tokens.*divide"),
        ("tokens", 16, 24, "block size 16 .* 24 tokens.*divide"),
        ("tokens", 24, 16, "block size 24 .* 16 tokens.*divide"),
        ("keys", 32, 16, "block size 32 is larger .* 16 tokens"),
        ("tokens", 0, 16, "block size 0 and key size 16"),
        ("tokens", 16, 0, "block size 16 and key size 0"),
        ("tokens", -1, 16, "block size -1 and key size 16"),
        ("blocks", 16, 16, "'blocks' is not known; there are: keys, tokens"),
    ],
)
def test_impossible_layouts_are_refused(count, block, key, message):
    """Sizes that do not fit each other and an unknown accounting raise InputError."""
    with pytest.raises(InputError, match=message):
        BlockLayout(count, block, key)


def hinted(*hints, prompt=64):
    """Return the priority steps of a prompt with `hints`, in blocks of 16."""
    return priority_steps(request(prompt, "abcd", 16, retention=hints), 16)


@pytest.mark.parametrize(
    ("hints", "prompt", "steps"),
    [
        ([], 64, []),
        ([(20, 40, 80, 5)], 64, [(1, 35, None), (3, 80, 5)]),
        ([(16, None, 80)], 50, [(1, 35, None), (4, 80, None)]),
        ([(0, 48, 20), (16, 32, 90)], 64, [(1, 20, None), (2, 90, None), (3, 20, None)]),
        ([(0, 16, 80, 5), (0, 16, 80, 9)], 64, [(1, 80, 9)]),
        ([(0, 16, 80, 5), (0, 16, 80, 9), (0, 16, 80)], 64, [(1, 80, None)]),
    ],
    ids=["none", "blocks it touches", "to the end", "highest", "longest", "without end"],
)
def test_the_strongest_hint_of_a_block_holds(hints, prompt, steps):
    """A block has the highest priority of the hints that touch it, for the longest time.

    Blocks before a hint have the default priority; a hint without end reaches the last block.
    """
    assert hinted(*(Retention(*hint) for hint in hints), prompt=prompt) == steps
