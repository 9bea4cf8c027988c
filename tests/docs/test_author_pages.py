"""The pages for authors of plugins name all that a plugin may override or call."""

from inspect import isfunction, signature
from pathlib import Path

import pytest

from kvcore import EvictionPolicy
from kvcore.serving.scheduler import ServiceTimes

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


def methods(cls):
    """Return the public methods of a class, each with its parameters as a call shows them."""
    for name, method in vars(cls).items():
        if isfunction(method) and not name.startswith("_"):
            parameters = ", ".join(
                f"*, {parameter.name}"
                if parameter.kind is parameter.KEYWORD_ONLY
                else parameter.name
                for parameter in signature(method).parameters.values()
                if parameter.name != "self"
            )
            yield f"`{name}({parameters})`"


@pytest.mark.parametrize(
    ("page", "cls"),
    [("write-a-scheduler.md", ServiceTimes), ("write-a-policy.md", EvictionPolicy)],
)
def test_a_page_names_each_method_with_its_parameters(page, cls):
    """A method that is added, or gets another parameter, is named so on the page."""
    text = (PAGES / page).read_text("utf-8")
    found = list(methods(cls))
    assert len(found) >= 3
    assert [call for call in found if call not in text] == []
