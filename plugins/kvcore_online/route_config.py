"""`RouteConfig`: every option of the proxy, and the TOML file that gives them."""

# ruff: noqa: RUF009 - `_option` makes fields

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

import attrs

from kvcore.config.files import read_tables
from kvcore.config.options import check_names, option_named
from kvcore.config.values import Natural, PluginChoice, as_bytes, convert
from kvcore.errors import InputError, redact
from kvcore.plugins.options import Spec
from kvcore.untrusted import fits_header

Bytes: TypeAlias = Annotated[int, as_bytes]
"""A number of bytes; as text with a unit, such as `8MiB`."""

MOST_REPLICAS = 1_000

MOST_SECONDS = 86_400.0


def _option(default: Any, text: str, least: int | None = None) -> Any:
    """Return a field with its default, its help text and its least value (None: any)."""
    return attrs.field(default=default, metadata={"help": text, "least": least})


@attrs.frozen(kw_only=True)
class Upstream:
    """A server that the proxy sends requests to.

    Attributes:
        url: address of its API without `/v1`, such as `http://127.0.0.1:8001`.
        name: name in metrics and in the header `x-kvcore-replica`; empty: its host and port.
        kv_events: address at which it publishes KV events over ZMQ.
        kv_replay: address at which it sends missing batches of KV events again.
        blocks, block_size, max_seqs: number of blocks in its pool, tokens in a block, and
            sequences that it runs at a time, for the router.
        prefill_rate: prompt tokens that it computes in a second, for the router.

    Raises:
        InputError: `url` is no URL of a server, `name` fits no header, or a number is not
            above 0.
    """

    url: str = _option("", "Address of its API, without /v1.")
    name: str = _option("", "Name of the server in metrics and answers.")
    kv_events: str | None = _option(None, "Address of its KV events, tcp://HOST:PORT.")
    kv_replay: str | None = _option(None, "Address that sends missing KV events again.")
    blocks: int = _option(8_192, "Number of KV blocks in its pool.")
    block_size: int = _option(16, "Number of tokens in a KV block.")
    max_seqs: int = _option(256, "Largest number of sequences that it runs at a time.")
    prefill_rate: float = _option(10_000.0, "Prompt tokens that it computes in a second.")

    def __attrs_post_init__(self) -> None:
        """Check the URL; name the server."""
        msg = f"url {redact(self.url)!r}: expected one such as http://127.0.0.1:8001"
        try:
            parts = urlsplit(self.url)
            complete = (
                parts.scheme in ("http", "https")
                and parts.hostname
                and (parts.port or 1)
                and parts.username is None
                and self.url.isprintable()
                and not set("?# ") & set(self.url)
            )
        except ValueError as error:  # brackets or a port that no address has
            raise InputError(msg) from error
        if not complete:
            raise InputError(msg)
        url = self.url.rstrip("/").removesuffix("/v1")
        object.__setattr__(self, "url", url)
        if not self.name:
            object.__setattr__(self, "name", parts.netloc)
        if not fits_header(self.name):
            msg = f"name {self.name!r} of {self.url} has control characters: leave them out"
            raise InputError(msg)
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
        router: the plugin that picks a server for a request.
        view: source of the router's knowledge of caches: `index`, with options, records the
            prompts sent to each server; `events` follows the servers' KV events over ZMQ.
        seed: seed of routers that draw random numbers; None: their own default.
        host, port: address to listen at; port 0 takes a free one.
        prefixes: keys of prompts are those of their `text`, or of their `tokens`, which cost
            one call of a server's `/tokenize` for each request. Events need tokens.
        key_tokens: number of tokens in a block of a prompt.
        key_chars: bytes of text that stand for such a block where tokens are not known.
        trace: file for REQUEST and ROUTE lines; None: none is written.
        trace_key: file with the key by which salts, sessions and keys of blocks are hashed in
            the trace; None: one is drawn, and kept nowhere.
        concurrency: largest number of requests in flight; further ones get 503.
        connections: largest number of connections of clients; further ones are closed.
        body, answer: largest size in bytes of a request, and of an answer that is no stream.
        connect_timeout: time until a server has taken a connection, or has answered a check.
        first_byte_timeout: time from then to the first byte of its answer.
        between_timeout: time between two parts of an answer.
        client_timeout: time in which a client sends its request, or takes a part of an answer.
        shutdown_timeout: time that requests in flight may take when the proxy ends.
        health_interval: time between two checks of a server.
        failures: number of failures in a row after which a server is down.
        retries: number of further servers that are tried before a request is refused.

    Raises:
        InputError: an option has an invalid value; the message begins with its name.
    """

    replicas: tuple[Upstream, ...]
    router: PluginChoice = _option(Spec("round-robin"), option_named("router").help)
    view: str = _option(
        "index",
        "Source of the router's knowledge of caches: an index of the prompts sent to each "
        "server (index), or the KV events of the servers (events).",
    )
    seed: int | None = _option(0, option_named("seed").help)
    host: str = _option(
        "127.0.0.1", "Address to listen at; other machines can use any but a loopback address."
    )
    port: Natural = _option(8000, "Port to listen at; 0 takes a free one.", least=0)
    prefixes: Literal["text", "tokens"] = _option(
        "text", "Keys of prompts by their text, or by token ids from a server's /tokenize."
    )
    key_tokens: int = _option(16, "Number of tokens in a block of a prompt.", least=1)
    key_chars: int = _option(64, "Bytes of text that stand for a block.", least=1)
    trace: Path | None = _option(None, "JSONL file to write REQUEST and ROUTE lines to.")
    trace_key: Path | None = _option(
        None, "File with the key by which names in the trace are hashed; else one is drawn."
    )
    concurrency: int = _option(1_024, "Largest number of requests in flight.", least=1)
    connections: int = _option(4_096, "Largest number of connections of clients.", least=1)
    body: Bytes = _option(8 << 20, "Largest size of a request in bytes.", least=1)
    answer: Bytes = _option(
        64 << 20, "Largest size in bytes of an answer that is no stream.", least=1
    )
    connect_timeout: float = _option(
        2.0, "Seconds until a server takes a connection, or answers a health check."
    )
    first_byte_timeout: float = _option(300.0, "Seconds until the first byte of an answer.")
    between_timeout: float = _option(60.0, "Seconds between two parts of an answer.")
    client_timeout: float = _option(
        30.0, "Seconds in which a client sends its request, or takes a part of an answer."
    )
    shutdown_timeout: float = _option(
        30.0, "Seconds that requests in flight may take when the proxy ends."
    )
    health_interval: float = _option(1.0, "Seconds between two checks of a server.")
    failures: int = _option(3, "Failures in a row after which a server is down.", least=1)
    retries: int = _option(3, "Further servers to try before a request is refused.", least=0)

    def __attrs_post_init__(self) -> None:
        """Check the options against one another, and numbers against their range."""
        names = [replica.name for replica in self.replicas]
        if not 0 < len(names) <= MOST_REPLICAS:
            msg = f"replicas: {len(names)} servers were given; expected 1 to {MOST_REPLICAS:,}"
            raise InputError(msg)
        if twice := {name for name in names if names.count(name) > 1}:
            msg = f"replicas: two are called {min(twice)!r}; give each a name of its own"
            raise InputError(msg)
        if self.view == "events" and not all(replica.kv_events for replica in self.replicas):
            msg = "view: events need the address kv_events of each replica"
            raise InputError(msg)
        sizes = {replica.block_size for replica in self.replicas}
        if self.view == "events" and sizes != {self.key_tokens}:
            msg = "view: events need the block_size of each replica to be key_tokens"
            raise InputError(msg)
        for name, field in attrs.fields_dict(RouteConfig).items():
            value = getattr(self, name)
            if name.endswith(("timeout", "interval")) and not 0 < value <= MOST_SECONDS:
                msg = f"{name}: {value!r} is not above 0 s and at most {MOST_SECONDS:,.0f} s"
                raise InputError(msg)
            least = field.metadata.get("least")
            if least is not None and value < least:
                msg = f"{name}: {value!r} is too small; the least is {least}"
                raise InputError(msg)

    @property
    def by_tokens(self) -> bool:
        """Whether keys of prompts need their token ids."""
        return self.prefixes == "tokens" or self.view == "events"

    @classmethod
    def from_options(cls, replicas: list[Any], **options: Any) -> Self:
        """Return a configuration of values in the form of TOML and of the command line.

        Args:
            replicas: URLs, or tables of the attributes of `Upstream`.
            options: values by name; others have their defaults.

        Raises:
            InputError: an option is unknown, or has an invalid value.
        """
        if not isinstance(replicas, list):
            msg = "replicas: expected tables, each under a heading [[replicas]]"
            raise InputError(msg)
        tables = [{"url": item} if isinstance(item, str) else item for item in replicas]
        servers = tuple(
            Upstream(**_read(table, Upstream, f"replicas[{index}]."))
            for index, table in enumerate(tables)
        )
        return cls(replicas=servers, **_read(options, cls, ""))

    @classmethod
    def from_toml(cls, path: Path, **options: Any) -> Self:
        """Return the configuration that a TOML file gives; `options` win.

        Raises:
            InputError: the file cannot be read, is no TOML, or has an unknown key or an
                invalid value; the message names the file and the key.
        """
        fields = {key.replace("-", "_"): value for key, value in read_tables(path).items()}
        if "servers" in fields and "replicas" not in fields:
            fields["replicas"] = fields.pop("servers")  # the word of the help
        for name in ("trace", "trace_key"):
            if isinstance(fields.get(name), str) and fields[name]:
                fields[name] = path.parent / fields[name]
        try:
            return cls.from_options(**{"replicas": [], **fields, **options})
        except InputError as error:
            msg = f"{path}: {error}"
            raise InputError(msg) from error


def _read(table: Any, cls: type, where: str) -> dict[str, Any]:
    """Return the values of a table, converted to the types of a class's fields."""
    if not isinstance(table, Mapping):
        msg = f"{where.rstrip('.')}: expected a table, not {table!r:.80}"
        raise InputError(msg)
    fields = {str(key).replace("-", "_"): value for key, value in table.items()}
    types = {field.name: field.type for field in attrs.fields(attrs.resolve_types(cls))}
    try:
        check_names(fields, types)
    except InputError as error:
        msg = f"{where[:-1]}: {error}" if where else str(error)
        raise InputError(msg) from None
    read = {}
    for name, value in fields.items():
        try:
            read[name] = convert(value, types[name])
        except InputError as error:
            msg = f"{where}{name}: {error}"
            raise InputError(msg) from error
    return read
