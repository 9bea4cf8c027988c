"""The limits of the border in words, as SECURITY.md prints them."""

from kvcore.untrusted import (
    BYTES_OF_LINE,
    BYTES_OF_REQUEST,
    EXPANDED_BYTES,
    FREE_LINES,
    FREE_REQUESTS,
    JSON_LEVELS,
    LONGEST_EVENT,
    LONGEST_HEADER,
    LONGEST_LINE,
    LONGEST_METRICS,
    LONGEST_SALT,
    LONGEST_SESSION,
    LONGEST_TOKENS,
    MOST_BLOCKS,
    MOST_COPIES,
    MOST_HEADERS,
    MOST_NAMES,
    MOST_RUN_BLOCKS,
    MOST_TIER_KEYS,
    MOST_TOKENS,
    MOST_VALUES,
    PAYLOAD_BYTES,
    PAYLOAD_EVENTS,
    PAYLOAD_LEVELS,
    PAYLOAD_OBJECTS,
    RECORDING_EXPANSION,
    TOML_BYTES,
    TOML_LEVELS,
    TRACE_EXPANSION,
    TRACE_HEADER_BYTES,
    WORK,
    WORK_OF_LINE,
    WORKLOAD_EXPANSION,
)


def power(limit: int) -> str:
    """Return the text of a power of two, such as `2^20 (1,048,576)`."""
    exponent = limit.bit_length() - 1
    assert limit == 1 << exponent, f"{limit:,} is no power of two"
    return f"2^{exponent} ({limit:,})"


LIMITS: tuple[tuple[str, str], ...] = (
    ("a line of a file", f"{LONGEST_LINE >> 20} MiB, and {power(MOST_VALUES)} values"),
    ("the header of a trace", f"{TRACE_HEADER_BYTES >> 20} MiB"),
    ("JSON, from files, clients and servers", f"nested at most {JSON_LEVELS} levels deep"),
    (
        "lists and objects in the JSON of clients and servers",
        f"{power(MOST_VALUES)}, opening brackets in texts counted",
    ),
    ("names in that JSON", power(MOST_NAMES)),
    ("a TOML file", f"{TOML_BYTES >> 20} MiB, nested at most {TOML_LEVELS} levels deep"),
    (
        "a compressed trace, expanded",
        f"{TRACE_EXPANSION} times its size, past the first {EXPANDED_BYTES >> 20} MiB",
    ),
    (
        "a compressed recording, expanded",
        f"{RECORDING_EXPANSION} times its size, past the first {EXPANDED_BYTES >> 20} MiB",
    ),
    (
        "lines of a recording",
        f"{FREE_LINES:,}, and one more for each {BYTES_OF_LINE} bytes of the file",
    ),
    (
        "a compressed workload file, expanded",
        f"{WORKLOAD_EXPANSION} times its size, past the first {EXPANDED_BYTES >> 20} MiB",
    ),
    (
        "requests of a compressed trace that is run again (a what-if)",
        f"{FREE_REQUESTS:,}, and one more for each {BYTES_OF_REQUEST} bytes of the file",
    ),
    ("numbers in a trace", "2^63 - 1"),
    ("blocks that the runs of a line stand for", power(MOST_RUN_BLOCKS)),
    (
        "blocks in use at once",
        f"{power(MOST_BLOCKS)}, whatever the header says of the pool",
    ),
    ("entries in the tables of open forks", power(MOST_COPIES)),
    ("keys of blocks in all tiers together", power(MOST_TIER_KEYS)),
    (
        "blocks and spans named, each time counted",
        f"{power(WORK)}, and {WORK_OF_LINE:,} more for each line",
    ),
    (
        "a payload of KV events",
        f"{PAYLOAD_BYTES >> 20} MiB, nested at most {PAYLOAD_LEVELS} levels deep",
    ),
    (
        "events, and texts, lists and maps, in such a payload",
        f"{power(PAYLOAD_EVENTS)}, and {power(PAYLOAD_OBJECTS)}",
    ),
    (
        "headers of a request to `serve` or `route`",
        f"{MOST_HEADERS}, each of {LONGEST_HEADER:,} bytes; its body by `--body`, and `body`",
    ),
    ("tokens of a request by a server's count", power(MOST_TOKENS)),
    ("the name of a session in a header or a body", f"{LONGEST_SESSION} characters"),
    ("a `cache_salt` of a request to `serve`", f"{LONGEST_SALT:,} characters"),
    (
        "an event in the stream of a server behind `route`",
        f"{LONGEST_EVENT >> 20} MiB; a whole answer by `answer`",
    ),
    ("the metrics of a server behind `route`", f"{LONGEST_METRICS >> 20} MiB are read"),
    ("the tokens of a prompt by such a server", f"{LONGEST_TOKENS >> 20} MiB"),
)
"""What is limited, and how; these are the rows of the table in SECURITY.md."""
