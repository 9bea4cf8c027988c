"""A gate for the prefix hits of an application: measured by a replay, compared to a baseline.

As a plugin of pytest, which a conftest.py names, it adds the fixture `kvcore_hits` and two
options; see docs/how-to/catch-a-cache-regression.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import pytest

if TYPE_CHECKING:
    from kvcore.workloads import Workload

SCHEMA: Literal[1] = 1

PathLike: TypeAlias = "str | os.PathLike[str]"


@attrs.frozen
class Hits:
    """The prefix hits of a workload in a cache.

    Attributes:
        requests: number of requests.
        prompt_tokens, hit_tokens: tokens of all prompts, and those that hit.
        missed: tokens that missed, by reason.
        setting: pool, block size and policy.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    missed: Mapping[str, int]
    setting: Mapping[str, Any]

    @property
    def share(self) -> float:
        """The share of prompt tokens that hit."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@attrs.frozen
class _File:
    """The content of a file of baselines: the hits, by name."""

    schema: Literal[1]
    baselines: dict[str, Hits]


def measure(
    workload: Workload | PathLike,
    *,
    blocks: int = 100_000,
    block_size: int = 16,
    eviction: str = "lru",
) -> Hits:
    """Replay a workload, serial and without a clock; return its hits, and why the rest missed.

    Args:
        workload: a workload, or its text: a recording, a log of prompts, KV events.
        blocks: blocks of the pool.
        block_size: tokens of a block.
        eviction: the eviction policy, with its options.

    Raises:
        InputError: the workload cannot be read, or the block size does not fit its keys.
    """
    from kvcore import KVCache, Plugins  # noqa: PLC0415 - every run of pytest loads this
    from kvcore.workloads.selection import open_workload  # noqa: PLC0415 - as above
    from kvcore_judge.misses import missed_tokens, replay_summary  # noqa: PLC0415 - as above

    cache = partial(KVCache, blocks, block_size, eviction=eviction)
    summary = replay_summary(open_workload(workload, Plugins()), cache)
    return Hits(
        requests=summary.admitted,
        prompt_tokens=summary.prompt_tokens,
        hit_tokens=summary.hit_tokens,
        missed=missed_tokens(summary),
        setting={"blocks": blocks, "block_size": block_size, "eviction": eviction},
    )


def regression(name: str, now: Hits, base: Hits, tolerance: float) -> str:
    """Return why `now` is worse than the baseline `base`; "" if it is not.

    Args:
        name: the name of the baseline.
        now: the hits.
        base: the hits in the baseline.
        tolerance: the share of prompt tokens by which hits may fall.
    """
    if dict(now.setting) != dict(base.setting):
        return (
            f"{name}: measured with {dict(now.setting)}, and the baseline with "
            f"{dict(base.setting)}: these do not compare; run again with --kvcore-hits-update"
        )
    from fractions import Fraction  # noqa: PLC0415 - every run of pytest loads this

    # As decimal digits say: a float of 0.8 - 0.1 is more than one of 0.7.
    least = Fraction(base.hit_tokens, max(base.prompt_tokens, 1)) - Fraction(str(tolerance))
    if Fraction(now.hit_tokens, max(now.prompt_tokens, 1)) >= least:
        return ""
    from kvcore_judge.misses import meaning  # noqa: PLC0415 - every run of pytest loads this

    told = (
        f"{name}: {now.share:.1%} of {now.prompt_tokens:,} prompt tokens hit, and "
        f"{base.share:.1%} of {base.prompt_tokens:,} in the baseline."
    )
    lines = [told]
    for reason in sorted({*now.missed, *base.missed}):
        here, earlier = (
            gate_run.missed.get(reason, 0) / max(gate_run.prompt_tokens, 1)
            for gate_run in (now, base)
        )
        if here > earlier:
            lines.append(
                f"  {here:6.1%} missed as {reason}: {meaning(reason)} ({earlier:.1%} before)"
            )
    return "\n".join(lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the gate to pytest."""
    group = parser.getgroup("kvcore")
    group.addoption("--kvcore-hits", metavar="FILE", help="Baseline of prefix hits, as JSON.")
    group.addoption(
        "--kvcore-hits-update",
        action="store_true",
        help="Write the prefix hits of this run to the baseline, in place of comparing them.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to update no file."""
    if config.getoption("--kvcore-hits-update") and config.getoption("--kvcore-hits") is None:
        msg = "--kvcore-hits-update: name the file to write, by --kvcore-hits FILE"
        raise pytest.UsageError(msg)


@pytest.fixture
def kvcore_hits(request: pytest.FixtureRequest) -> Iterator[Callable[..., Hits]]:
    """Return a function that measures the prefix hits of a workload, and fails if they fell.

    It takes a name for the baseline, the workload, and `blocks`, `block_size`, `eviction` and
    `tolerance`, the share of prompt tokens by which hits may fall.
    """
    option = request.config.getoption("--kvcore-hits")
    update = request.config.getoption("--kvcore-hits-update")
    path = None if option is None else Path(option)
    measured: dict[str, Hits] = {}

    def check(
        name: str, workload: Workload | PathLike, *, tolerance: float = 0.0, **setting: Any
    ) -> Hits:
        __tracebackhide__ = True  # a failure is shown at the line of the test, not here
        hits = measure(workload, **setting)
        measured[name] = hits
        if path is None or update:
            return hits
        known = _baselines(path)
        if name not in known:
            pytest.fail(f"{path} has no baseline {name!r}: run with --kvcore-hits-update")
        why = regression(name, hits, known[name], tolerance)
        if why:
            pytest.fail(why)
        return hits

    yield check
    if path is not None and update and measured:
        add_baselines(path, measured)


def _baselines(path: Path) -> dict[str, Hits]:
    """Return the baselines of a file; none if there is no such file."""
    import msgspec  # noqa: PLC0415 - every run of pytest loads this module

    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).baselines
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        pytest.fail(
            f"{path} has no baselines: remove it, and run with --kvcore-hits-update; {error}"
        )


def add_baselines(path: Path, measured: Mapping[str, Hits]) -> None:
    """Add baselines to a file, once no other process of these tests does."""
    import orjson  # noqa: PLC0415 - every run of pytest loads this module

    from kvcore.errors import InputError  # noqa: PLC0415 - as above
    from kvcore.files import atomic_file  # noqa: PLC0415 - as above

    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    while True:
        try:
            with atomic_file(path) as file:  # a full disk leaves the older baselines
                content = attrs.asdict(_File(SCHEMA, {**_baselines(path), **measured}))
                file.buffer.write(orjson.dumps(content, option=options))
        except InputError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            sleep(0.01)
        else:
            return
