"""Samples of a workload: a part of its requests, scaled to shorter lengths."""

from array import array
from itertools import islice
from typing import ClassVar

import attrs
import pytest
from helpers.serving import ask

from kvcore import InputError, KVCache, Request, Workload
from kvcore.request import Hints, KeyPrefix, Retention
from kvcore.workloads import RequestList, WorkloadSample
from kvcore_plugins.workload import Mooncake
from kvcore_replay.untimed import replay


@attrs.define(slots=False, eq=False)
class Given(Workload):
    """A workload of the given requests."""

    name: ClassVar[str] = "given"
    key_tokens: ClassVar[int] = 8

    requests: list[Request]

    def __iter__(self):
        """Yield the requests."""
        return iter(self.requests)

    @property
    def digest(self):
        """A constant digest."""
        return "0" * 32


def scaled(factor, **fields):
    """Return a request whose lengths are divided by `factor`."""
    (request,) = WorkloadSample(Given([ask("a", key_tokens=8, **fields)]), scale=factor)
    return request


def test_prompts_are_rounded_down_and_outputs_up():
    """Prompts are rounded down and outputs up.

    A length above 0 stays at least 1, and 0 stays 0.
    """
    request = scaled(4, prompt=15, output=5, predicted_output_tokens=9)
    assert (request.prompt_tokens, request.output_tokens, request.predicted_output_tokens) == (
        3,
        2,
        3,
    )
    request = scaled(8, prompt=7, output=1)
    assert (request.prompt_tokens, request.output_tokens, request.predicted_output_tokens) == (
        1,
        1,
        None,
    )
    request = scaled(8, prompt=0, output=0)
    assert (request.prompt_tokens, request.output_tokens) == (0, 0)


@pytest.mark.parametrize("prompt", range(1, 40))
def test_keys_fit_the_prompt(prompt):
    """A scaled prompt has as many full blocks as the original, and a key for each block."""
    request = scaled(4, prompt=prompt, keys=list(range(-(-prompt // 8))))
    assert request.key_tokens == 2
    assert request.prompt_tokens // 2 == prompt // 8
    assert len(request.keys) == -(-request.prompt_tokens // 2)


def test_hints_keep_their_tokens():
    """Hints cover the tokens of the scaled prompt that they covered before."""
    hints = (Retention(3, 9, 80), Retention(8, None, 10))
    assert scaled(4, prompt=40, retention=hints).retention == (
        Retention(0, 3, 80),
        Retention(2, None, 10),
    )
    hints = Hints(share=9, pin=5)
    assert scaled(4, prompt=40, hints=hints).hints == Hints(share=2, pin=5)


def test_limit_bounds_the_requests():
    """`limit` bounds the requests, and gives the size if the source has a known size."""
    assert (
        len(list(WorkloadSample(Mooncake(), limit=7)))
        == WorkloadSample(Mooncake(), limit=7).size
        == 7
    )
    assert WorkloadSample(Mooncake()).size == Mooncake().size
    assert WorkloadSample(Given([]), limit=7).size is None
    assert [request.id for request in WorkloadSample(Given([ask("a")]), limit=7)] == ["a"]


def test_a_scaled_sample_has_the_hits_of_the_original():
    """A sample scaled together with its blocks has the hits of the original, within 5%."""
    full = replay(islice(Mooncake(), 500), KVCache(2000, 512, accounting="keys"))
    small = replay(
        WorkloadSample(Mooncake(), limit=500, scale=32), KVCache(2000, 16, accounting="keys")
    )
    assert small.lookup_blocks <= full.lookup_blocks < small.lookup_blocks * 1.05
    assert small.hit_blocks <= full.hit_blocks < small.hit_blocks * 1.05


def test_the_digest_depends_on_limit_and_scale():
    """Samples that differ in `limit` or `scale` have different digests."""
    made = [(None, 1), (5, 1), (None, 2), (5, 2), (6, 2)]
    assert len({WorkloadSample(Mooncake(), *options).digest for options in made}) == len(made)


def test_the_options_are_those_of_the_source():
    """The options are those of the source, with `limit` and `shrink`."""
    source = Mooncake()
    options = WorkloadSample(source, limit=5, scale=32).options()
    assert options == {**source.options(), "limit": 5, "shrink": 32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "the first 0 requests of given: give 1 or more"),
        ({"scale": 3}, "keys of 8 tokens can only be divided by 1, 2, 4, 8"),
        ({"scale": 0}, "given shrunk 0 times"),
    ],
)
def test_an_invalid_limit_or_scale_is_refused(options, message):
    """An invalid `limit` or `scale` raises InputError."""
    with pytest.raises(InputError, match=message):
        WorkloadSample(Given([]), **options)


def test_a_window_includes_its_start_and_not_its_end():
    """A window keeps the requests from its start to before its end, with their arrivals."""
    source = Given([ask(name, at=at) for name, at in zip("abcd", (0, 5, 9, 10), strict=True)])
    kept = list(WorkloadSample(source, window=(5, 10)))
    assert [(request.id, request.arrival) for request in kept] == [("b", 5), ("c", 9)]
    assert [request.id for request in WorkloadSample(source, window=(5, None))] == [
        "b",
        "c",
        "d",
    ]
    assert [request.id for request in WorkloadSample(source, limit=1, window=(5, None))] == [
        "b"
    ]


def test_a_window_may_begin_within_a_session():
    """A request whose predecessor is outside the window has none.

    Later requests of the session keep theirs.
    """
    turns = [
        ask("a", at=0, session="s"),
        ask("b", at=5, session="s", after="a", think_time=3),
        ask("c", at=6, session="s", after="b", think_time=3),
    ]
    first, second = WorkloadSample(Given(turns), window=(5, None))
    assert (first.id, first.after, first.think_time) == ("b", None, 0)
    assert second is turns[2]


def test_an_empty_window_is_refused():
    """A window without requests raises InputError."""
    with pytest.raises(InputError, match="window 7:8: no request of given arrives in it"):
        list(WorkloadSample(Given([ask("a")]), window=(7 * 10**9, 8 * 10**9)))


def test_a_window_is_in_options_and_digest():
    """A window is in the options and the digest, and makes the size unknown."""
    sample = WorkloadSample(Mooncake(), window=(60 * 10**9, None))
    assert sample.options()["window"] == "60:"
    assert (sample.name, sample.size) == ("mooncake", None)
    assert sample.digest != WorkloadSample(Mooncake()).digest


def test_a_list_of_requests_has_the_digest_of_its_fields():
    """Equal fields have one digest, in any sequence of keys; other fields have another."""
    path = array("q", [1, 2, 3])
    keys = [1, 2], KeyPrefix(path, 2), path[:2]
    same = {RequestList([ask("a", key_tokens=8, keys=key)]).digest for key in keys}
    assert len(same) == 1
    others = {"output": 9}, {"at": 1}, {"keys": [1, 3]}, {"tenant": "b"}
    digests = {
        RequestList([ask("a", key_tokens=8, **{"keys": [1, 2]} | fields)]).digest
        for fields in others
    }
    assert len(digests | same) == 5
