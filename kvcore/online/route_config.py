"""`RouteConfig`: every option of the proxy, and the TOML file that gives them."""

# ruff: noqa: RUF009 - `_option` makes fields

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

import attrs

from kvcore.config.options import check_names, option_help
from kvcore.config.values import Natural, PluginChoice, as_bytes, convert
from kvcore.errors import InputError
from kvcore.files import unreadable_reason
from kvcore.plugins.options import Spec

Bytes: TypeAlias = Annotated[int, as_bytes]
"""A number of bytes; as text with a unit, such as `8MiB`."""

MOST_REPLICAS = 1_000

MOST_SECONDS = 86_400.0


def _option(default: Any, text: str) -> Any:
    """Return a field with its default and its help text."""
    return attrs.field(default=default, metadata={"help": text})


@attrs.frozen(kw_only=True)
class Upstream:
    """A server that the proxy sends requests to.

    Attributes:
        url: where its API is, without `/v1`: `http://127.0.0.1:8001`.
        name: what metrics and the header `x-kvcore-replica` call it; empty: its host and port.
        kv_events: address at which it publishes KV events over ZMQ.
        kv_replay: address at which it sends missing batches of them again.
        blocks, block_size, max_seqs: its pool, the tokens in a block, and the sequences that it
            runs at a time: what routers see of it.
        prefill_rate: tokens of a prompt that it computes in a second, for routers that ask.

    Raises:
        InputError: no URL of a server, or a number that is not above 0.
    """

    url: str = _option("", "Where its API is, without /v1.")
    name: str = _option("", "What metrics and answers call it.")
    kv_events: str | None = _option(None, "Address of its KV events, tcp://HOST:PORT.")
    kv_replay: str | None = _option(None, "Address that sends missing KV events again.")
    blocks: int = _option(8_192, "Number of KV blocks in its pool.")
    block_size: int = _option(16, "Number of tokens in a KV block.")
    max_seqs: int = _option(256, "Largest number of sequences that it runs at a time.")
    prefill_rate: float = _option(10_000.0, "Prompt tokens that it computes in a second.")

    def __attrs_post_init__(self) -> None:
        """Check the URL; name the server."""
        parts = urlsplit(self.url)
        try:
            found = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:
            found = None
        if not found or parts.query or parts.fragment or parts.username is not None:
            msg = f"url {self.url!r}: expected one such as http://127.0.0.1:8001"
            raise InputError(msg)
        url = self.url.rstrip("/").removesuffix("/v1")
        object.__setattr__(self, "url", url)
        if not self.name:
            object.__setattr__(self, "name", parts.netloc)
        for name in ("blocks", "block_size", "max_seqs", "prefill_rate"):
            if not getattr(self, name) > 0:
                msg = f"{name} of {self.url} must be above 0, not {getattr(self, name)!r}"
                raise InputError(msg)


@attrs.frozen(kw_only=True)
class RouteConfig:
    """The options of `kvcore route`. Nothing is opened or built from them yet.

    Times are in seconds.

    Attributes:
        replicas: the servers.
        router: the plugin that picks one of them for a request.
        view: what it knows of their caches: `index`, with options, is what the proxy has sent
            where; `events` is what the servers tell over ZMQ.
        seed: of routers that draw random numbers; None: their own default.
        host, port: where to listen; port 0 takes a free one.
        prefixes: blocks of prompts are those of `text`, or of `tokens`, which a server is asked
            for (`/tokenize`) once a request. Events need tokens.
        key_tokens: tokens in a block of a prompt.
        key_chars: bytes of text that stand for such a block where tokens are not known.
        trace: file to write REQUEST and ROUTE lines to; None: none.
        concurrency: requests in flight above which others are refused with 503.
        connections: connections of clients above which others are closed.
        body, answer: bytes of the largest request, and of the largest answer at once.
        connect_timeout: until a server has taken a connection, or has answered a check.
        first_byte_timeout: from there to the first byte of its answer.
        between_timeout: from one part of an answer to the next.
        client_timeout: in which a client sends its request, and takes a part of the answer.
        shutdown_timeout: that requests in flight are given when the proxy is told to end.
        health_interval: between two checks of a server.
        failures: failures in a row after which a server is down.
        retries: other servers that are tried before a request is refused.

    Raises:
        InputError: a value that an option cannot have; begins with the option's name.
    """

    replicas: tuple[Upstream, ...]
    router: PluginChoice = _option(Spec("round-robin"), option_help("router"))
    view: str = _option(
        "index",
        "What the router knows of caches: what was sent where (index), or the KV events of "
        "the servers (events).",
    )
    seed: int | None = _option(0, option_help("seed"))
    host: str = _option("127.0.0.1", "Address to listen at; others than loopback are open.")
    port: Natural = _option(8000, "Port to listen at; 0 takes a free one.")
    prefixes: Literal["text", "tokens"] = _option(
        "text", "Blocks of prompts by their text, or by the tokens that a server is asked for."
    )
    key_tokens: int = _option(16, "Number of tokens in a block of a prompt.")
    key_chars: int = _option(64, "Bytes of text that stand for a block.")
    trace: Path | None = _option(None, "JSONL file to write REQUEST and ROUTE lines to.")
    concurrency: int = _option(1_024, "Largest number of requests in flight.")
    connections: int = _option(4_096, "Largest number of connections of clients.")
    body: Bytes = _option(8 << 20, "Largest request.")
    answer: Bytes = _option(64 << 20, "Largest answer that is not streamed.")
    connect_timeout: float = _option(
        2.0, "Seconds until a server takes a connection, or says that it is healthy."
    )
    first_byte_timeout: float = _option(300.0, "Seconds until the first byte of an answer.")
    between_timeout: float = _option(60.0, "Seconds between two parts of an answer.")
    client_timeout: float = _option(30.0, "Seconds in which a client sends or takes a part.")
    shutdown_timeout: float = _option(30.0, "Seconds for requests in flight at the end.")
    health_interval: float = _option(1.0, "Seconds between two checks of a server.")
    failures: int = _option(3, "Failures in a row after which a server is down.")
    retries: int = _option(3, "Other servers that are tried before a request is refused.")

    def __attrs_post_init__(self) -> None:
        """Check what depends on several options, and numbers by their range."""
        names = [each.name for each in self.replicas]
        if not 0 < len(names) <= MOST_REPLICAS:
            msg = f"replicas: {len(names)} servers were given; expected 1 to {MOST_REPLICAS:,}"
            raise InputError(msg)
        if twice := {name for name in names if names.count(name) > 1}:
            msg = f"replicas: two are called {min(twice)!r}; give each a name of its own"
            raise InputError(msg)
        if self.view == "events" and not all(each.kv_events for each in self.replicas):
            msg = "view: events need the address kv_events of each replica"
            raise InputError(msg)
        sizes = {each.block_size for each in self.replicas}
        if self.view == "events" and sizes != {self.key_tokens}:
            msg = "view: events need the block_size of each replica to be key_tokens"
            raise InputError(msg)
        for name, field in attrs.fields_dict(RouteConfig).items():
            value = getattr(self, name)
            if name.endswith(("timeout", "interval")) and not 0 < value <= MOST_SECONDS:
                msg = f"{name}: {value!r} is not in 0 to {MOST_SECONDS:,.0f} s, or is 0"
                raise InputError(msg)
            if type(field.default) is int and value is not None and value < (name in _FROM_1):
                msg = f"{name}: {value!r} is too small"
                raise InputError(msg)

    @property
    def by_tokens(self) -> bool:
        """Whether the tokens of prompts are asked for."""
        return self.prefixes == "tokens" or self.view == "events"

    @classmethod
    def of(cls, replicas: list[Any], **options: Any) -> Self:
        """Return a configuration from values as TOML and the command line have them.

        Args:
            replicas: URLs, or tables of the attributes of `Upstream`.
            options: by name; what is left out is default.

        Raises:
            InputError: an unknown name, or a value that an option cannot have.
        """
        if not isinstance(replicas, list):
            msg = "replicas: expected tables, each under a heading [[replicas]]"
            raise InputError(msg)
        tables = [{"url": each} if isinstance(each, str) else each for each in replicas]
        servers = tuple(
            Upstream(**_read(table, Upstream, f"replicas[{place}]."))
            for place, table in enumerate(tables)
        )
        return cls(replicas=servers, **_read(options, cls, ""))

    @classmethod
    def from_toml(cls, path: Path, **options: Any) -> Self:
        """Return the configuration that a TOML file gives; `options` win.

        Raises:
            InputError: no such file, no TOML, an unknown key, or a value that its option
                cannot have; names the file and the key.
        """
        try:
            given = tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            msg = f"{path}: cannot be read: {unreadable_reason(path, error)}"
            raise InputError(msg) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            msg = f"{path}: is not TOML: {error}"
            raise InputError(msg) from error
        given = {key.replace("-", "_"): value for key, value in given.items()}
        if isinstance(given.get("trace"), str) and given["trace"]:
            given["trace"] = path.parent / given["trace"]
        try:
            return cls.of(**{"replicas": [], **given, **options})
        except InputError as error:
            msg = f"{path}: {error}"
            raise InputError(msg) from error


_FROM_1 = {
    "key_tokens",
    "key_chars",
    "concurrency",
    "connections",
    "body",
    "answer",
    "failures",
}


def _read(table: Any, cls: type, where: str) -> dict[str, Any]:
    """Return the values of a table, converted to the types of a class's fields."""
    if not isinstance(table, Mapping):
        msg = f"{where.rstrip('.')}: expected a table, not {table!r:.80}"
        raise InputError(msg)
    given = {str(key).replace("-", "_"): value for key, value in table.items()}
    types = {field.name: field.type for field in attrs.fields(attrs.resolve_types(cls))}
    try:
        check_names(given, list(types))
    except InputError as error:
        msg = f"{where[:-1]}: {error}" if where else str(error)
        raise InputError(msg) from None
    read = {}
    for name, value in given.items():
        try:
            read[name] = convert(value, types[name])
        except InputError as error:
            msg = f"{where}{name}: {error}"
            raise InputError(msg) from error
    return read
