"""Figures: the formats, the common style, and the axes of all plots."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from kvcore.lazy import import_extra

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

FORMS = ("png", "svg", "pdf")
"""What matplotlib writes by itself: pixels for pages, curves for the web and for papers."""

# Okabe and Ito, "Color Universal Design", 2008: colour-blind people can distinguish them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")

DARK = ("#332288", "#117733", "#882255", "#999933", "#661100", "#44AA99")
"""Tol's colours, "Colour Schemes", 2021, for lines that are more than `COLOURS` has."""

MARKERS = "osD^vP"

INK, GREY, PALE = "#222222", "#666666", "#E4E4E4"

INCHES, DPI = (7.2, 4.4), 200

MARGIN = 1.08
"""Factor from the smallest and the largest value of an axis to its ends."""

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    # A dollar in a name of a trace begins no formula.
    "text.parse_math": False,
    # Without a salt the names inside an SVG are random.
    "svg.hashsalt": "kvcore",
    # TrueType: conferences refuse the Type 3 fonts that are the default.
    "pdf.fonttype": 42,
}


def matplotlib() -> Any:
    """Import matplotlib. Raises PluginError if it is not installed."""
    return import_extra("matplotlib.figure", "a plot needs matplotlib", "lab")


def picture(
    form: str, draw: Callable[[Figure], None], inches: tuple[float, float] = INCHES
) -> bytes:
    """Return a figure in the common style, which `draw` draws into, as a file of `FORMS`.

    Raises:
        PluginError: matplotlib is not installed.
    """
    module = matplotlib()
    from matplotlib import rc_context  # noqa: PLC0415 - as above

    file = io.BytesIO()
    with rc_context(STYLE), warnings.catch_warnings():
        # Names may be in any script: a character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure = module.Figure(figsize=inches, layout="constrained")
        draw(figure)
        # Without a time, equal figures have equal bytes.
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
        figure.savefig(file, format=form, dpi=DPI, metadata=metadata)
    return file.getvalue()


def add_title(figure: Figure, title: str, caption: str = "") -> None:
    """Write a title above a figure, and a caption in small letters below it."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    if caption:
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=5.5, color=GREY)


DIGITS = (1, 3), (1, 2, 5), range(1, 10), [tenths / 10 for tenths in range(10, 100)]
"""Ticks of a logarithmic axis within a power of ten: the first of these that has several."""


def log_ticks(low: float, high: float) -> list[float]:
    """Return the ticks of a logarithmic axis: several, if `high` is at least 1.15 `low`."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks: list[float] = []
    for digits in DIGITS:
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) > 1:
            break
    return ticks


def log_axis(axis: Axis, low: float, high: float, label: str) -> None:
    """Label a logarithmic axis, and set its ticks."""
    ticks = log_ticks(low / MARGIN, high * MARGIN)
    axis.set_ticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    axis.set_ticks([], minor=True)
    axis.set_label_text(label)
