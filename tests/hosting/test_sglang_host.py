"""The host of SGLang's radix tree, without SGLang: which waiting request it admits."""

import gc
import weakref
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvcore import EvictionPolicy, read_events
from kvcore.plugins import resolve
from kvcore_hosting import EngineRecorder
from kvcore_replay.check.trace import check_trace

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

    parent = None

    def __init__(self, rid, prompt=()):
        self.rid = rid
        self.origin_input_ids = prompt
        self.output_ids = ()

    def finished(self):
        """Return True once there is output."""
        return bool(self.output_ids)


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


def test_output_is_recorded_once_after_a_retraction(host, tmp_path):
    """A request that is retracted and comes again names each block of its output once."""
    path = tmp_path / "r.jsonl"
    host.recorder = EngineRecorder(
        path, blocks=64, block_size=1, eviction=resolve("eviction", "lru"), engine="sglang"
    )
    request = Waiting("a", (1, 2))
    request.sampling_params = SimpleNamespace(max_new_tokens=5)
    top = host.root
    nodes = []

    def insert(node):
        host.request = request
        host.begin()
        host.inserted(node)
        host.request = None

    def admit(node, prompt):
        host.begin()
        host.matched(node, Tokens(prompt), request)
        host.locked(node)

    admit(top, (1, 2))
    for tokens in (1, 2), (11, 12), (13, 14):
        nodes.append(Waiting(tokens))
        nodes[-1].parent, nodes[-1].key = top, Tokens(tokens)
        top = nodes[-1]
    prompt, output, rest = nodes
    insert(prompt)
    insert(output)
    host.ended(request)  # it is retracted
    admit(output, (1, 2, 11, 12))
    insert(output)
    request.output_ids = (11, 12, 13, 14, 15)
    insert(rest)
    host.ended(request)
    assert host.recorder.disagreements == {}
    host.recorder.close()
    named = [event.keys for event in read_events(path) if event.as_dict()["event"] == "KEYS"]
    assert [key for keys in named for key in keys] == host.span(rest).path_keys[2:6]
    check_trace(path)
