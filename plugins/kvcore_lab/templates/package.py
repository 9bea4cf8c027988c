"""Packages of plugins to begin with: a module for each kind, which works and passes its kit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import NamedTuple

from kvcore.errors import InputError
from kvcore.plugins.manager import KINDS


class Kit(NamedTuple):
    """The conformance kit of a kind.

    Attributes:
        tests: the class of the kit.
        page: page of the documentation about such plugins.
        also: what the class of tests has beside the plugin.
    """

    tests: str
    page: str
    also: str = ""


PIECES = '''

    def pieces(self, block):
        """Yield the stored bytes of a block and what overwrites them: damage must be found."""
        content = self.store.content
        yield content[block.slot], lambda data: content.update({block.slot: data})'''

KITS: Mapping[str, Kit] = {
    "eviction": Kit("EvictionPolicyTests", "how-to/write-a-policy.md"),
    "prefix": Kit("PrefixIndexTests", "how-to/write-a-prefix-index.md"),
    "retention": Kit("RetentionPolicyTests", "reference/retention.md"),
    "scheduler": Kit("SchedulerTests", "how-to/write-a-scheduler.md"),
    "rules": Kit("RulesTests", "how-to/write-engine-rules.md"),
    "latency": Kit("LatencyModelTests", "reference/latency.md"),
    "backend": Kit("BackendTests", "reference/backends.md"),
    "codec": Kit("CodecTests", "reference/codecs.md", "\n    error = 1 / 200"),
    "tier": Kit("TierTests", "reference/tiers.md", PIECES),
    "generator": Kit("GeneratorTests", "reference/generators.md"),
    "workload": Kit("WorkloadTests", "how-to/write-a-workload.md"),
    "router": Kit("RouterTests", "how-to/write-a-router.md"),
    "drafter": Kit("DrafterTests", "how-to/speculative-decoding.md"),
    "checkpoint": Kit("CheckpointTests", "how-to/write-a-checkpoint-policy.md"),
}
"""The kits, by kind of plugin."""

PROJECT = """\
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"

[project]
name = "kvcore-{name}"
version = "0.1.0"
description = "A plugin of kvcore: {kind} {name}."
requires-python = ">=3.11"
dependencies = ["kvcore"]

[project.optional-dependencies]
test = ["kvcore[testing]"]

[project.entry-points.kvcore]
{name} = "{module}"

[tool.hatch.build]
dev-mode-dirs = ["."]

[tool.hatch.build.targets.wheel]
only-include = ["{module}.py"]
"""

README = """\
# kvcore-{name}

{about}

    pip install -e '.[test]'
    kvcore plugins {kind}
    pytest

Change `{module}.py`, and run the tests again: they are the conformance kit of kvcore.
What such a plugin may do: docs/{page} of kvcore.
"""

TEST = '''\
"""The conformance kit of kvcore."""

from kvcore.testing import {tests}
from {module} import Example


class TestExample({tests}):
    """All that kvcore expects of a plugin of this kind holds."""

    {kind} = Example{also}
'''

HOOK = '''\


@hookimpl
def {hook}() -> list[type[Example]]:
    """Return the plugins of this package."""
    return [Example]
'''


def package_files(kind: str, name: str) -> dict[str, str]:
    """Return the files of a new package with a plugin, by their paths in it.

    Raises:
        InputError: an unknown kind, or a name that no package can have, or one here has.
    """
    if kind not in KITS:
        msg = f"there are no plugins of kind {kind!r}; there are: {', '.join(KITS)}"
        raise InputError(msg)
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        msg = f"{name!r}: give a name of small letters and digits, such as my-policy"
        raise InputError(msg)
    module_name = f"kvcore_{name.replace('-', '_')}"
    if find_spec(module_name):
        msg = f"{name!r}: the module {module_name} exists: give another name"
        raise InputError(msg)
    kit, source = KITS[kind], Path(__file__).with_name(f"{kind}.py").read_text("utf-8")
    about = re.search(r"class Example.*?\n    \"\"\"(.*?)(?:\n|\"\"\")", source)
    assert about is not None
    fields = {
        "kind": kind,
        "name": name,
        "module": module_name,
        "about": about[1],
        "hook": KINDS[kind],
        **kit._asdict(),
    }
    module, imports = re.subn(r"(?m)^(from kvcore import .*)$", r"\1, hookimpl", source)
    if not imports:
        module = source.replace("from kvcore.", "from kvcore import hookimpl\nfrom kvcore.", 1)
    named = "".join(word.capitalize() for word in name.split("-"))
    hides = re.search(rf"\b{named}\b", f"{source} {kit.tests}")
    if hides or iskeyword(named) or named.startswith("Test"):
        # It would hide a class that is used, be no name, or be taken for tests by pytest.
        named = f"Custom{named}"

    def filled(text: str) -> str:
        text = text.format_map(fields)
        return re.sub(r"\b(Test)?Example\b", rf"\1{named}", text)

    return {
        "pyproject.toml": PROJECT.format_map(fields),
        "README.md": README.format_map(fields),
        f"{fields['module']}.py": re.sub(
            r"\bExample\b", named, module.replace('"example"', f'"{name}"')
        )
        + filled(HOOK),
        f"tests/test_{fields['module']}.py": filled(TEST),
    }
