"""The KV events that a server publishes: tokens, salts, and gaps for slow readers."""

import threading
from threading import Event

import pytest
from helpers.jobs import job

from kvcore import KVCache
from kvcore.request import text_request
from kvcore_engine.tokens import TokenStream
from kvcore_events.formats import decode
from kvcore_events.model import BlockRemoved, BlockStored
from kvcore_online import stored as room
from kvcore_online.stored import StoredBlocks


class Publisher:
    """A publisher that records (number, event) as subscribers would receive them.

    Attributes:
        gate: an event that is set while subscribers read.
    """

    def __init__(self):
        self.got, self.number, self.closed, self.gate = [], 0, False, Event()
        self.gate.set()

    def publish(self, payload):
        """Record a batch, unless the gate is closed."""
        self.gate.wait()
        (event,) = decode(payload).events
        self.got.append((self.number, event))
        self.number += 1

    def skip(self, batches):
        """Skip sequence numbers."""
        self.number += batches

    def serve(self, seconds):
        """Ignore requests for a replay."""

    def close(self):
        """Record that it was closed."""
        self.closed = True


@pytest.fixture
def publisher():
    """Yield a publisher whose subscribers read everything."""
    made = Publisher()
    yield made
    made.gate.set()


def serve(cache, blocks, *requests):
    """Open, commit and close requests one by one."""
    for request in requests:
        blocks.opened(request)
        seq = cache.open(request, None, None)
        cache.commit(seq, request.prompt_tokens - seq.computed, None)
        cache.close(seq, None)
        blocks.closed(request)


def ask(name, tokens, salt=None):
    """Return a request for a cache of blocks of 4 tokens."""
    return text_request(name, tokens, output=0, block_size=4, salt=salt)


def make(publisher, blocks=8):
    """Return a cache and its StoredBlocks."""
    cache = KVCache(blocks, 4, accounting="tokens", ids=True)
    return cache, StoredBlocks(cache, publisher)


def test_blocks_come_with_their_tokens_and_parents(publisher):
    """New blocks are published with their tokens and their parent, and evicted ones by hash."""
    cache, stored = make(publisher, blocks=4)
    stored.start()
    serve(cache, stored, ask(0, range(8)), ask(1, [*range(8), *range(50, 54)]))
    serve(cache, stored, ask(2, range(100, 116)))
    stored.close()
    first, second, *removed, last = [event for _, event in publisher.got]
    assert first == BlockStored(
        hashes=first.hashes, tokens=tuple(range(8)), block_size=4, medium="GPU"
    )
    assert (second.parent, second.tokens) == (first.hashes[-1], (50, 51, 52, 53))
    assert all(isinstance(event, BlockRemoved) for event in removed)
    gone = {value for event in removed for value in event.hashes}
    assert gone == {*first.hashes, *second.hashes}
    assert last.tokens == tuple(range(100, 116))
    assert publisher.closed


def test_a_salt_is_published_with_the_first_block(publisher):
    """Equal prompts of two salts have different hashes, and the first block has its salt."""
    cache, stored = make(publisher)
    stored.start()
    serve(cache, stored, ask(0, range(8)), ask(1, range(8), salt="tenant"))
    stored.close()
    plain, salted = (event for _, event in publisher.got)
    assert plain.tokens == salted.tokens
    assert not set(plain.hashes) & set(salted.hashes)
    assert plain.extra_keys is None
    assert salted.extra_keys == (("tenant",), None)


def test_dropped_batches_leave_a_gap_in_the_numbers(publisher, monkeypatch):
    """Batches dropped for lack of room are counted, and leave a gap in the numbers."""
    monkeypatch.setattr(room, "_QUEUED", 2)
    cache, stored = make(publisher, blocks=100)
    prompts = [ask(index, range(4 * index, 4 * index + 4)) for index in range(6)]
    serve(cache, stored, *prompts[:5])
    assert stored.dropped == 3
    publisher.gate.clear()
    stored.start()
    while stored._batches.full():
        pass
    serve(cache, stored, prompts[5])
    publisher.gate.set()
    stored.close()
    assert [number for number, _ in publisher.got] == [0, 1, 5]


def test_a_batch_that_cannot_be_sent_is_a_gap(publisher, capsys):
    """An error in the thread that publishes loses one batch, a gap, and not those after it."""
    cache, stored = make(publisher, blocks=100)
    publish = publisher.publish

    def fail(_):
        publisher.publish = publish
        raise ZeroDivisionError

    publisher.publish = fail
    prompts = [ask(index, range(4 * index, 4 * index + 4)) for index in range(3)]
    serve(cache, stored, *prompts)
    stored.start()
    stored.close()
    assert [number for number, _ in publisher.got] == [1, 2]
    assert stored.dropped == 1
    assert "KV events are not published: ZeroDivisionError" in capsys.readouterr().err


def test_an_error_while_nothing_is_sent_is_no_gap(publisher, capsys):
    """An error in the answer to a replay loses no batch, and those that follow are sent."""
    cache, stored = make(publisher)
    failed = Event()

    def fail(_):
        failed.set()
        raise ZeroDivisionError

    publisher.serve = fail
    stored.start()
    assert failed.wait(5)
    serve(cache, stored, ask(0, range(4)))
    stored.close()
    assert [number for number, _ in publisher.got] == [0]
    assert stored.dropped == 0
    assert "KV events are not published: ZeroDivisionError" in capsys.readouterr().err


def test_closing_waits_a_limited_time_for_a_subscriber(publisher, monkeypatch):
    """Closing waits a limited time for one who does not read, and so does the process."""
    monkeypatch.setattr(room, "_PATIENCE_SECONDS", 0.01)
    cache, stored = make(publisher)
    publisher.gate.clear()
    stored.start()
    serve(cache, stored, ask(0, range(8)))
    stored.close()
    assert not publisher.closed
    threads = [one for one in threading.enumerate() if one.name == "kvcore-kv-events"]
    assert [one.daemon for one in threads] == [True]


def test_tokens_and_salts_are_kept_for_cached_blocks_only(publisher):
    """Tokens and salts are kept only for the blocks that are cached."""
    cache, stored = make(publisher, blocks=4)
    stored.start()
    for index in range(20):
        serve(cache, stored, ask(index, range(index, index + 16), salt=str(index)))
    cancelled = ask(20, range(100, 116), salt="20")  # before it has stored a block
    stored.opened(cancelled)
    stored.closed(cancelled)
    stored.close()
    assert len(stored._tokens) == cache.tree.cached_blocks == 4
    assert len(stored._salts) == 1
    assert not stored._open


def test_what_lies_below_hears_of_blocks_too(publisher):
    """Tiers below the cache are called for stored, hit and removed blocks."""
    calls = []

    class Below:
        def stored(self, span, blocks, now):
            calls.append(("stored", blocks))

        def hit(self, span, now):
            calls.append(("hit", span.blocks))

        def leaving(self, span, blocks, now, reason):
            calls.append(("leaving", blocks))

    cache = KVCache(4, 4, accounting="tokens", ids=True)
    cache.tree.watcher = Below()
    stored = StoredBlocks(cache, publisher)
    stored.start()
    serve(cache, stored, ask(0, range(8)), ask(1, range(9)), ask(2, range(100, 116)))
    assert calls == [("stored", 2), ("hit", 2), ("leaving", 2), ("stored", 4)]
    stored.close()


def test_generated_blocks_come_with_the_tokens_that_were_generated(publisher):
    """A block of an answer has its tokens, the last ones of the prompt before them included."""
    _, stored = make(publisher)
    request = ask(0, range(10))
    stored.opened(request)
    served = job(request)
    stream = TokenStream(request, 1000, 0)
    for token in range(100, 107):
        stream.append(token)
    stored.generated(served, [b"k" * 16, b"l" * 16], stream)
    served.named_keys = (b"k" * 16, b"l" * 16)
    assert stored._tokens[b"k" * 16] == (8, 9, 100, 101)
    assert stored._tokens[b"l" * 16] == (102, 103, 104, 105)
    for token in range(107, 110):
        stream.append(token)
    stored.generated(served, [b"m" * 16], stream)
    assert stored._tokens[b"m" * 16] == (106, 107, 108, 109)
    # A key that is known keeps its tokens.
    stored.generated(served, [b"k" * 16], stream)
    assert stored._tokens[b"k" * 16] == (8, 9, 100, 101)


def test_generated_blocks_that_are_never_stored_are_forgotten(publisher):
    """A request that ends leaves no tokens of its answer but those of stored blocks."""
    _, stored = make(publisher)
    request = ask(0, range(10))
    stored.opened(request)
    stream = TokenStream(request, 1000, 0)
    for token in range(100, 107):
        stream.append(token)
    stored.generated(job(request), [b"k" * 16, b"l" * 16], stream)
    stored.closed(request)
    assert not stored._tokens
    assert not stored._open


def test_blocks_of_an_open_prompt_keep_their_tokens_while_they_are_evicted(publisher):
    """A prompt that is open stores its blocks with their tokens again after an eviction."""
    cache, stored = make(publisher, blocks=4)
    first, other = ask(0, range(8)), ask(1, range(50, 66))
    serve(cache, stored, first)
    stored.opened(first)
    stored.opened(first)
    serve(cache, stored, other)  # evicts the blocks of the first one
    stored.closed(first)
    serve(cache, stored, first)
    stored.closed(first)
    stored.start()
    stored.close()
    told = [event.tokens for _, event in publisher.got if isinstance(event, BlockStored)]
    assert told == [tuple(range(8)), tuple(range(50, 66)), tuple(range(8))]
