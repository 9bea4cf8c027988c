"""Block keys from token ids: known values, chaining, salt, extra keys and errors."""

import pickle
import struct
from array import array
from hashlib import blake2b

import pytest

from kvcore import InputError, KVCache, Request
from kvcore.request import KeyPrefix, block_keys
from kvcore.workloads import check_keys

TOKENS = [11, 22, 33, 44, 55, 66, 77]


def digest(*parts):
    """Return BLAKE2b-128 of `parts`."""
    return blake2b(b"".join(parts), digest_size=16).digest()


def packed(*tokens):
    """Return token ids as 8 bytes each, little-endian."""
    return struct.pack(f"<{len(tokens)}Q", *tokens)


def test_a_key_hashes_the_key_before_and_the_tokens():
    """Each key is the BLAKE2b-128 of the key before it and of the block's tokens."""
    first = digest(digest(b"[3,null]"), packed(11, 22, 33))
    second = digest(first, packed(44, 55, 66))
    assert block_keys(TOKENS, 3) == [first, second]


def test_keys_are_the_same_in_all_versions():
    """Keys are the same in all versions and on all machines, as stored traces need."""
    assert block_keys(range(4), 4)[0].hex() == "a50ea5b81b49866c500d5d6513bd5c07"


@pytest.mark.parametrize(
    "extra",
    [{"lora": "b"}, {"image": "a"}, {"lora": 1}, {"lora": "1"}, {"image": "a", "lora": "a"}],
)
def test_extra_keys_of_two_kinds_never_collide(extra):
    """Extra keys differ by tag, by value and by type of value, such as 1 and "1"."""
    assert block_keys(TOKENS, 7, extra={0: extra}) != block_keys(
        TOKENS, 7, extra={0: {"lora": "a"}}
    )


def test_tokens_cannot_pass_for_a_salt_or_an_extra_key():
    """No tokens hash like a salt or like extra keys, since all parts have fixed lengths."""
    salt, lora = b'[["salt","x"]]', b'[["lora","x"]]'
    text = b"A" * 18 + lora
    salted = list(struct.unpack("<4Q", text))
    plain = list(struct.unpack("<4Q", (salt + text)[:32]))
    assert block_keys(salted, 4, salt="x") != block_keys(plain, 4, extra={0: {"lora": "x"}})


@pytest.mark.parametrize("tokens", [bytes(TOKENS), bytearray(TOKENS), tuple(TOKENS)])
def test_token_ids_may_be_any_sequence(tokens):
    """Token ids may be bytes, a bytearray or a tuple."""
    assert block_keys(tokens, 3) == block_keys(TOKENS, 3)


@pytest.mark.parametrize("tokens", [[1, -1], [2**64], [1.5], ["a"], "abc"])
def test_invalid_token_ids_are_refused(tokens):
    """Values that are no token ids raise InputError with the valid range."""
    with pytest.raises(InputError, match="integers from 0 to 2\\^64 - 1"):
        block_keys(tokens, 2)


@pytest.mark.parametrize("size", [0, -4])
def test_block_size_must_be_positive(size):
    """A block size below 1 raises InputError with its value."""
    with pytest.raises(InputError, match=f"block size {size} must be positive"):
        block_keys(TOKENS, size)


@pytest.mark.parametrize("extra", [{"image": b"9f3c"}, {"image": 2**70}, {"image": object()}])
def test_invalid_extra_keys_are_refused(extra):
    """A value that is no extra key raises InputError with its tag and the valid types."""
    with pytest.raises(
        InputError, match=r"extra keys are text or integers by tag, not .*image"
    ):
        block_keys(TOKENS, 2, extra={0: extra})


def test_a_key_prefix_reads_as_a_list():
    """A `KeyPrefix` has the length, items, slices and text of the list of its keys."""
    keys, same = KeyPrefix(array("q", [5, 6, 7, 8]), 3), [5, 6, 7]
    assert (len(keys), [*keys], repr(keys)) == (3, same, repr(same))
    assert [keys[place] for place in (0, 2, -1, -3)] == [5, 7, 7, 5]
    with pytest.raises(IndexError):
        keys[3]
    for part in (slice(2), slice(9), slice(1, None), slice(None, None, 2), slice(-1), slice(0)):
        assert keys[part] == same[part]


def test_a_key_prefix_compares_by_its_keys():
    """A `KeyPrefix` equals a list or prefix of the same keys, and has no hash."""
    path = array("q", [5, 6, 7])
    keys = KeyPrefix(path, 2)
    assert keys == [5, 6] == keys
    assert keys == KeyPrefix(path, 2) == KeyPrefix(array("q", [5, 6]), 2) == (5, 6)
    assert keys != KeyPrefix(path, 3)
    assert keys != [5, 6, 7]
    assert keys != [5, 7]
    assert keys != b"\5\6"
    with pytest.raises(TypeError):
        hash(keys)


def test_a_pickled_key_prefix_has_only_its_own_keys():
    """A pickled `KeyPrefix` has only its own keys, not the rest of the shared path."""
    copy = pickle.loads(pickle.dumps(KeyPrefix(array("q", range(100)), 2)))  # noqa: S301
    assert copy == [0, 1]
    assert len(copy.path) == 2


def turns(*counts, path=range(100)):
    """Return requests whose keys are prefixes of one path, of the lengths `counts`."""
    shared = array("q", path)
    return [
        Request(id=n, prompt_tokens=count, key_tokens=1, keys=KeyPrefix(shared, count))
        for n, count in enumerate(counts)
    ]


def test_requests_with_key_prefixes_hit_as_with_lists():
    """Requests with a `KeyPrefix` hit the same blocks as requests with lists."""
    for accounting in ("keys", "tokens"):
        hits = []
        for kind in (list, lambda keys: keys):
            cache = KVCache(60, 1, accounting=accounting)
            for request in turns(20, 30, 10, 30, 70, 20):
                request.keys = kind(request.keys)
                seq = cache.open(request, min(request.prompt_tokens, 60) - cache.probe(request))
                cache.commit(seq, seq.tokens - seq.computed)
                cache.close(seq)
                hits.append(seq.hit_blocks)
            cache.check_integrity()
        assert hits[:6] == hits[6:]


def test_a_workload_item_that_is_no_request_is_refused():
    """A workload item that is no request raises InputError with its number and value."""
    requests = [Request(id=1, prompt_tokens=4, key_tokens=4), {"id": 2}]
    with pytest.raises(InputError, match=r"number 2 of the workload is {'id': 2}, which is no"):
        list(check_keys(requests))


def test_key_prefixes_are_checked_as_lists_are():
    """A key that follows two different keys raises InputError when it first does."""
    requests = turns(2, 2, 4, 6, path=[1, 2, 3, 4, 2, 5])
    checked = check_keys(requests)
    assert [next(checked).id for _ in range(3)] == [0, 1, 2]
    message = "request 3, number 4: key 2 stands after key 4, in an earlier request after key 1"
    with pytest.raises(InputError, match=message):
        next(checked)


def conversation(copied):
    """Yield the turns of a conversation, whose one list of keys grows from turn to turn."""
    keys = []
    for turn in range(3):
        keys.append(turn)
        kept = keys[:] if copied else keys
        yield Request(id=turn, prompt_tokens=4 * len(keys), key_tokens=4, keys=kept)


@pytest.mark.parametrize("kind", [list, iter], ids=["list", "generator"])
def test_prompts_that_share_a_growing_list_of_keys_are_refused(kind):
    """Keys that a prompt got after it was made are an InputError that says to copy the list."""
    message = "request 0, number 1: . keys of 4 tokens for a prompt of 4: .* a copy: keys="
    with pytest.raises(InputError, match=message):
        list(check_keys(kind(conversation(copied=False))))
    assert len(list(check_keys(kind(conversation(copied=True))))) == 3


@pytest.mark.parametrize(("prompt", "most"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_a_prompt_has_no_more_keys_than_its_tokens_fill(prompt, most):
    """A prompt may have a key for a partial block; one more is an InputError."""
    for count in range(most + 1):
        one = Request(id=1, prompt_tokens=prompt, keys=range(count), key_tokens=16)
        assert list(check_keys([one])) == [one]
    one = Request(id=1, prompt_tokens=prompt, keys=range(most + 1), key_tokens=16)
    with pytest.raises(InputError, match=f"{most + 1} keys of 16 tokens"):
        list(check_keys([one]))


@pytest.mark.parametrize(
    "keys", [iter([1]), {1: 2}, {1}, None, [[1]]], ids=lambda k: type(k).__name__
)
def test_keys_that_are_no_list_are_refused(keys):
    """Keys that are a generator, a dict or the like are an InputError that asks for a list."""
    with pytest.raises(
        InputError, match=r"request 7: keys=.*: give integers or bytes in a list"
    ):
        Request(id=7, prompt_tokens=16, keys=keys, key_tokens=16)
