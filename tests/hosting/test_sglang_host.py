"""The host of SGLang's radix tree, without SGLang: which waiting request it admits."""

import gc
import weakref
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from kvcore import EvictionPolicy

SOURCE = Path(__file__).parents[2] / "plugins/kvcore-sglang/kvcore_sglang/host.py"


class Tokens(tuple):  # noqa: SLOT001 - with salts of their own
    """A key of tokens."""

    extra_key = cache_salt = is_bigram = None
    token_ids = property(list)

    def __new__(cls, tokens, *_others):
        """Return the tokens."""
        return super().__new__(cls, tokens)

    def child_key(self, page_size):
        """Return the tokens of the first page."""
        return self[:page_size]

    def page_aligned(self, _page_size):
        """Return the tokens: a page is one."""
        return self


class Waiting:
    """A request of SGLang, or a node."""

    def __init__(self, rid):
        self.rid = rid


class Told(EvictionPolicy):
    """A policy that lists the ids of requests that miss."""

    name = "told"

    def __init__(self):
        self.missed = []

    def on_miss(self, request, hit, now):
        """List the id of the request."""
        self.missed.append(request.id)

    def victim(self, now):
        """Return None: nothing is evicted."""


@pytest.fixture
def host():
    """Return a host of a policy, and the root of its tree as `root`."""
    spec = spec_from_file_location("sglang_host", SOURCE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.TreeHost(Told(), 64, 1)
    made.root = Waiting("the root")
    return made


@pytest.mark.parametrize("trials", [0, 2])
def test_the_request_that_was_matched_last_is_admitted(host, trials):
    """A lock admits the request that was matched last, where several wait at a node."""
    requests = [Waiting(name) for name in "abc"]
    for request in (*requests, requests[1]):
        host.begin()
        host.matched(host.root, Tokens(ord(request.rid) + place for place in (0, 9)), request)
    for _ in range(trials):
        host.locked(host.root)
        host.unlocked(host.root)
    host.locked(host.root)
    host.evicting()
    assert host.eviction.missed == ["b"]


def test_a_request_that_is_aborted_while_it_waits_is_forgotten(host):
    """The host keeps no request that waits, so that one that is aborted leaves the memory."""
    request = Waiting("a")
    gone = weakref.ref(request)
    host.matched(host.root, Tokens((1, 2)), request)
    host.locked(host.root)
    host.unlocked(host.root)
    del request
    gc.collect()
    assert gone() is None
