"""The options of verbs that read a trace: what to change in it, its replica, and prices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import click

from kvcore.config import RunParts
from kvcore.config.options import option_named, option_names
from kvcore.config.values import refuse
from kvcore.errors import InputError
from kvcore.hookspecs import OUTPUT, Ran
from kvcore.units import format_dollars
from kvcore_cli.options import Command, shared
from kvcore_cli.output import output_option, print_table
from kvcore_cli.verb import option


def what_if_options(command: Command) -> Command:
    """Give a verb the options of a recorded run that may change; None: as recorded."""
    for name in reversed(option_names()):
        declaration = option_named(name)
        if declaration.what_if:
            text = declaration.help if declaration.what_if is True else declaration.what_if
            command = shared(name, text=text, default=None)(command)
    return command


def refuse_recording(file: Path) -> NoReturn:
    """Refuse an option for a recording of KV events.

    Raises:
        InputError: names the workload that has its requests.
    """
    msg = (
        f"{file} is a recording of KV events: it is checked and shown, without options. "
        "`kvcore compare` and `curve` run its requests as "
        f"kv-events:path={file},lookups=full, if the engine reported every use"
    )
    raise InputError(msg)


replica_option = click.option(
    "--replica",
    metavar="NUMBER[:LIFE]",
    help="Number of a replica in the trace of a cluster; if it failed and returned, also the "
    "number of its life, such as 1:2.",
)

live_option = output_option(
    "--live",
    is_flag=True,
    help="Show pool and queue on stderr during the run, as `kvcore watch` shows a trace.",
)
"""The option that shows a run while it is made."""

PRICED = ("anthropic", "openai", "gemini", "deepseek", "xai")
"""Providers of `kvcore_replay.pricing`, which is imported with `--price` alone."""


def _read_prices(
    ctx: click.Context,
    param: click.Parameter,
    value: str,
    read: Callable[[str], Any],
    table: tuple[Sequence[str], Iterable[Sequence[str]], Sequence[str]],
) -> Any:
    """Return the prices that a text names; for `list` print a table of all, and exit."""
    if value == "list":
        headers, rows, right = table
        print_table(headers, rows, right=right)
        ctx.exit()
    try:
        return read(value)
    except InputError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _price(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Return the prices that the text of `--price` names."""
    if value is None or ctx.resilient_parsing:
        return None
    from kvcore_replay.pricing import PRICES, find_price  # noqa: PLC0415 - for prices alone
    from kvcore_replay.report.billing import PRICE_HEADERS, price_rows  # noqa: PLC0415 - as above

    table = PRICE_HEADERS, price_rows(PRICES.values()), PRICE_HEADERS[1:6]
    return _read_prices(ctx, param, value, find_price, table)


price_option = click.option(
    "--price",
    callback=_price,
    is_eager=True,
    metavar="PRICE",
    help=f"Prices by which to bill the workload: those of {', '.join(PRICED)}, or of one of "
    "their models (`list` shows all); or figures in USD per million tokens and a TTL in "
    "seconds, such as input=3.00,cached=0.30,write=3.75,write_1h=6.00,ttl=300.",
)
"""The option that bills a workload by the prices of an API."""


def as_gpu_prices(value: object) -> str:
    """Return prices of GPUs in a file as text; the one of all devices may be a number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        refuse("text such as 'h100=2.5', or a number", value)
    return str(value)


class _GpuPrices(click.types.StringParamType):
    toml = Annotated[str | float, as_gpu_prices]
    """The type of the value in a file."""


def _gpu_price(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    """Return the prices that the text of `--gpu-price` names."""
    if value is None or ctx.resilient_parsing:
        return {}
    from kvcore_replay.gpu_cost import PRICES, read_gpu_prices  # noqa: PLC0415 - if any are given

    rows = [(name, format_dollars(price.usd), price.source) for name, price in PRICES.items()]
    table = ("device", "USD an hour", "source"), rows, ("USD an hour",)
    return _read_prices(ctx, param, value, read_gpu_prices, table)


gpu_price_option = option(
    "--gpu-price",
    heading=OUTPUT,
    type=_GpuPrices(),
    callback=_gpu_price,
    is_eager=True,
    metavar="PRICES",
    help="Dollars for an hour of a GPU, such as h100=2.5,b200=5, or 2.5 for every device.  "
    "[default: those of a table, which `list` shows]",
)
"""The option of the prices by which a deployment is costed."""


def billed(parts: RunParts, result: Any, given: Mapping[str, Any]) -> Ran:
    """Return the bills of the prices of `--price` for a run."""
    from kvcore_replay.billing import bill  # noqa: PLC0415 - for prices alone
    from kvcore_replay.report.billing import bill_sections  # noqa: PLC0415 - as above

    bills = bill(parts.workload, given["price"], log=result.log).as_dict()
    return Ran({"bill": bills}, bill_sections(bills))
