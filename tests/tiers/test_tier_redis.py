"""The Redis tier: whatever its server does, it returns correct K/V, none, or an OSError."""

import sys
from contextlib import closing, suppress
from io import BytesIO

import pytest
from helpers.redis_server import answering, running
from helpers.tiers import SIZE, blocks, read, write

from kvcore import InputError, KVCache, PluginError
from kvcore.plugins import resolve
from kvcore.trace import Trace
from kvcore_tiers.hierarchy import Tiers
from kvcore_tiers.tier import Redis, redis

SLOTS = 8

pytest.importorskip("redis")


def opened(url, slots=SLOTS, **options):
    """Open a store that closes at the end of a `with`."""
    tier = Redis(url=url, memory=slots * SIZE, **options)
    return closing(tier.open(slots, SIZE, b"model"))


@pytest.fixture
def url(redis_server, redis_client):
    """Return the URL of an empty server."""
    assert not redis_client.dbsize()
    return redis_server.url


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock of pauses by a list with one number: the seconds."""
    now = [1000.0]
    monkeypatch.setattr(redis, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def own_server():
    """Run a server for this test alone, which the test may stop."""
    with running() as server:
        yield server


def test_a_large_block_is_stored_as_many_values(url, redis_client, monkeypatch):
    """A large block is stored as values of bounded size, and moved in bounded batches."""
    monkeypatch.setattr(redis, "CHUNK_BYTES", 700)
    monkeypatch.setattr(redis, "BATCH_BYTES", 2 * SIZE)
    path = blocks(range(5))
    with opened(url) as store:
        write(store, path)
        assert read(store, path) == 5
    name = redis_client.keys("*")[0]
    assert redis_client.hlen(name) == 6
    assert max(map(len, redis_client.hvals(name))) == 700


@pytest.mark.parametrize(
    ("size", "count", "sent"),
    [((17 << 20) // 3, 3, [2, 1]), (8, 1001, [1000, 1])],
    ids=["bytes", "keys"],
)
def test_a_request_has_at_most_16_mib_or_1000_blocks(url, redis_client, size, count, sent):
    """Blocks are sent and asked for in requests of up to 16 MiB and 1000 blocks.

    They are stored as values of 4 MiB and less.
    """
    path, data = blocks(range(count)), memoryview(bytearray(count * size))
    store = Redis(url=url, memory=count * size).open(count, size, b"model")
    ask, requests = store._ask, []

    def spy(commands):
        requests.append(0)
        return ask(commands)

    def counting(call):
        def counted(*arguments):
            requests[-1] += 1
            return call(*arguments)

        return counted

    store._send, store._unpack = counting(store._send), counting(store._unpack)
    store._ask = spy
    with closing(store):
        store.write(path, data)
        assert store.read(path, data) == count
    assert requests == 2 * sent
    values = redis_client.hgetall(redis_client.randomkey())
    assert [len(values[b"%d" % n]) for n in range(len(values) - 1)] == [
        min(4 << 20, size - start) for start in range(0, size, 4 << 20)
    ]


@pytest.mark.parametrize("field", [b"0", b"2", b"header"])
def test_a_block_with_a_missing_or_changed_value_is_not_read(
    url, redis_client, monkeypatch, field
):
    """A block with a missing or changed value is not read; a value of another type raises."""
    monkeypatch.setattr(redis, "CHUNK_BYTES", 1100)
    path = blocks([4])
    with opened(url) as store:
        write(store, path)
        (name,) = redis_client.keys("*")
        redis_client.hset(name, field, b"x" * 2000)
        assert read(store, path) == 0
        redis_client.hdel(name, field)
        assert read(store, path) == 0
        redis_client.set(name, "no hash")
        with pytest.raises(OSError, match=r"refused: .*WRONGTYPE"):
            read(store, path)
        write(store, path)
        assert read(store, path) == 1


def test_blocks_expire_after_their_time_to_live(url, redis_client):
    """A block expires `ttl` seconds after its last write or read, and never without `ttl`."""
    for ttl, least, most in ((50.0, 40_000, 50_000), (None, -1, -1)):
        path = blocks([0])
        with opened(url, ttl=ttl) as store:
            write(store, path)
            (name,) = redis_client.keys("*")
            assert least <= redis_client.pttl(name) <= most
            if ttl:
                redis_client.pexpire(name, 9000)
                assert read(store, path) == 1
                assert least <= redis_client.pttl(name) <= most


def test_a_closed_store_leaves_no_connection(url, redis_client):
    """A store has a connection to the server while it is open, and none afterwards."""
    clients = len(redis_client.client_list())
    with opened(url) as store:
        write(store, blocks([0]))
        assert len(redis_client.client_list()) > clients
    redis_client.ping()  # in the turn after it, the server has seen the end
    assert len(redis_client.client_list()) == clients


def test_a_failure_leaves_no_connection(url, redis_client):
    """After a failure no connection is open, on which a late answer could come."""
    clients = len(redis_client.client_list())
    with opened(url) as store:
        with pytest.raises(OSError, match="does not answer as it should"):
            store._ask([("none",)])
        redis_client.ping()  # in the turn after it, the server has seen the end
        assert len(redis_client.client_list()) == clients


def test_a_refused_connection_is_closed(own_server):
    """A server that refuses the first request has no connection afterwards."""
    with own_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-ping")
        clients = len(client.client_list())
        with pytest.raises(InputError, match=r"refused: .*start the server") as error:
            opened(own_server.url)
        client.time()  # in the turn after it, the server has seen the end
        assert len(client.client_list()) == clients
        assert error.traceback  # which still has the store


def test_two_runs_share_blocks(url):
    """Two runs of one model share blocks, and both miss a block that one of them drops."""
    path = blocks([5, 6, 7])
    with opened(url) as store, opened(url) as other:
        write(store, path)
        found = sorted(other.recover(), key=lambda block: block.position)
        assert [block.slot for block in found] == [0, 1, 2]
        assert read(other, found) == 3
        store.drop([7])
        assert (other.present(found), read(other, found)) == (2, 2)


def test_a_run_recovers_no_more_blocks_than_it_has_slots(url):
    """A run with less memory recovers as many blocks as it has slots, from the first on."""
    with opened(url) as store:
        write(store, blocks(range(SLOTS)))
    with opened(url, slots=3) as store:
        assert sorted(block.position for block in store.recover()) == [0, 1, 2]


@pytest.mark.parametrize(("there", "warnings"), [(5, 0), (6, 1)])
def test_a_run_looks_at_no_more_than_twice_as_many_blocks_as_it_has_slots(
    url, caplog, there, warnings
):
    """With 3 slots it stops at the 6th block, and logs a warning."""
    with opened(url) as store:
        write(store, blocks(range(there)))
    with opened(url, slots=3) as store:
        assert len(list(store.recover())) == 3
    assert len(caplog.records) == warnings


def test_blocks_of_a_flushed_server_are_missing(url, redis_client):
    """Blocks deleted on the server are neither present nor read; new ones can be written."""
    path = blocks(range(3))
    with opened(url) as store:
        write(store, path)
        redis_client.flushall()
        assert (store.present(path), read(store, path)) == (0, 0)
        write(store, path)
        assert (store.present(path), read(store, path)) == (3, 3)


def test_a_write_to_a_full_server_stores_no_block(own_server):
    """A write to a full server raises OSError and stores none of its blocks."""
    old, new = blocks(range(3)), blocks(range(3, SLOTS), text=1)
    with own_server.client() as client, opened(own_server.url) as store:
        write(store, old)
        client.config_set("maxmemory", 1)
        with pytest.raises(OSError, match=r"refused: .*maxmemory"):
            write(store, new)
        assert (store.present(new), read(store, old), client.dbsize()) == (0, 3, 3)
        client.config_set("maxmemory", 0)
        write(store, new)
        assert (read(store, new), client.dbsize()) == (5, 8)


def test_a_restarted_server_is_used_again(own_server, clock):
    """Calls raise OSError while the server is down, and work when it restarts empty."""
    path = blocks(range(3))
    with opened(own_server.url) as store:
        write(store, path)
        own_server.stop()
        for call in (
            lambda: store.present(path),
            lambda: read(store, path),
            lambda: write(store, path),
        ):
            clock[0] += 100
            with pytest.raises(OSError, match="does not answer"):
                call()
        own_server.start()
        clock[0] += 100
        assert store.present(path) == 0
        write(store, path)
        assert read(store, path) == 3


def test_the_pause_doubles_with_each_failure(clock):
    """After each failure in a row the pause before the next attempt doubles, up to 30 s."""
    path = blocks([0])
    with answering(b"?!\r\n") as (url, asked), opened(url) as store:
        store._held[0] = path[0]
        pauses = []
        for _ in range(12):
            with pytest.raises(OSError, match="does not answer as it should"):
                store.present(path)
            asked.clear()
            failed = clock[0]
            with pytest.raises(OSError, match="is left alone"):
                store.present(path)
            clock[0] = store._again - 1e-6
            with pytest.raises(OSError, match="is left alone"):
                store.present(path)
            assert not asked
            pauses.append(store._again - failed)
            clock[0] = store._again
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert pauses[-3:] == pytest.approx([30, 30, 30])


GARBAGE = {
    "nothing": b"",
    "text": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "zeros": b"\0" * 100,
    "error": b"-ERR unknown\r\n",
    "integer": b":5\r\n",
    "no-integer": b":five\r\n",
    "null": b"$-1\r\n",
    "no-size": b"$x\r\n",
    "too-long": b"$99999999999999\r\nabc\r\n",
    "negative": b"*-7\r\n",
    "list": b"*2\r\n$1\r\na\r\n$1\r\nb\r\n",
    "many": b"*99999999\r\n",
    "nested": b"*1\r\n" * 3000,
    "not-utf8": b"+\xff\xfe\r\n",
}


def hurry(store, seconds):
    """Shorten the time-out of all later answers, but not of the greeting.

    A greeting may take longer on a busy CPU.
    """
    pool = store._client.connection_pool
    pool.disconnect()
    pool.connection_kwargs["socket_timeout"] = seconds


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=list(GARBAGE))
def test_an_invalid_answer_returns_no_block(answer, clock):
    """An invalid answer raises OSError or finds no block; it never crashes or returns K/V."""
    path = blocks(range(2))
    with answering(answer) as (url, _), opened(url, timeout=0.2) as store:
        hurry(store, 0.05)
        for call in (
            lambda: write(store, path),
            lambda: store._held.update(enumerate(path)) or read(store, path),
            lambda: store.present(path) if answer != b":5\r\n" else 0,
            lambda: len(list(store.recover())),
            lambda: store.drop([0]),
        ):
            clock[0] += 100
            with suppress(OSError):
                assert not call()


@pytest.mark.parametrize("greets", [True, False])
def test_a_server_that_never_answers_raises_after_the_time_out(greets, clock):
    """Calls to a server that never answers raise an error after the time-out, and ask once."""
    path = blocks([0])
    with answering(None, greets=greets) as (url, asked):
        if not greets:
            with pytest.raises(InputError, match="does not answer as it should: Timeout"):
                opened(url, timeout=0.2)
            return
        with opened(url) as store:
            hurry(store, 0.02)
            for call in (lambda: write(store, path), lambda: list(store.recover())):
                clock[0] += 100
                with pytest.raises(OSError, match="Timeout"):
                    call()
            assert max(asked.count("DEL"), asked.count("SCAN")) < 2


def test_recover_ends_on_a_server_whose_scan_never_ends(clock, caplog):
    """`recover` ends after 30 s on a server whose scan never ends, and logs a warning."""
    endless = b"*2\r\n$1\r\n7\r\n*0\r\n"
    with answering(endless) as (url, asked), opened(url) as store:
        scan = store._ask

        def slow(commands):
            clock[0] += 1
            return scan(commands)

        store._ask = slow
        assert not list(store.recover())
        # Two commands of a second each: one for names, one for their headers.
        assert asked.count("SCAN") == redis.SCAN_S / 2 + 1
    (warning,) = caplog.records
    assert warning.message.endswith(" has more blocks than were looked at")


@pytest.mark.parametrize("option", ["ttl", "timeout"])
def test_times_are_a_millisecond_or_more(option):
    """The server counts milliseconds: shorter times are refused, and a ttl may be None."""
    for seconds in (0.001, 1.0):
        assert getattr(Redis(memory=SIZE, **{option: seconds}), option) == seconds
    with pytest.raises(InputError, match=f"{option}=0.0009.*0.001 or more"):
        Redis(memory=SIZE, **{option: 0.0009})
    assert Redis(memory=SIZE, ttl=None).ttl is None


def test_a_tier_without_a_server_is_refused():
    """Opening a tier without a server raises InputError that suggests to start one."""
    with answering(b"") as (url, _):
        pass
    with pytest.raises(InputError, match=r"redis://127.*does not answer.*start the server"):
        opened(url)


@pytest.mark.parametrize(
    "url", ["redis://me:secret@127.0.0.1:1/0", "http://me:secret@h/", "redis://me:secret@h:x/0"]
)
def test_credentials_are_shown_nowhere(url):
    """User and password of the URL are in no option, text, header or error of the tier."""
    tier = Redis(url=f"{url}?password=secret", memory=SIZE)
    out = BytesIO()
    trace = Trace(out)
    Tiers(KVCache(4, trace=trace), [tier], SIZE)
    trace.close()
    shown = [str(tier.options()), repr(tier), out.getvalue().decode()]
    with pytest.raises(InputError) as error:
        tier.open(1, SIZE, b"")
    cause = error.value
    while cause is not None:
        shown.append(f"{cause!r} {cause}")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    assert not [text for text in shown if "secret" in text or "me:" in text]


@pytest.mark.parametrize(
    "wrong", ["latency=-1", "ttl=x", "timeout=0", "colour=red", "url=x", "memory=2", "=", ":x"]
)
def test_credentials_are_not_in_errors_of_options(wrong):
    """An error about another option repeats the given text without the password."""
    with pytest.raises(InputError) as error:
        resolve("tier", f"redis:memory=1GiB,url=redis://me:secret@h/0?password=secret,{wrong}")
    assert "secret" not in str(error.value)


def test_a_missing_package_redis_is_reported(monkeypatch):
    """Without the package `redis`, opening raises PluginError that names the extra."""
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(PluginError, match=r"pip install 'kvcore\[redis\]'"):
        opened("redis://127.0.0.1:1/0")
