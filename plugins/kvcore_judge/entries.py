"""A policy to judge: a name with options, or a class in a file."""

from __future__ import annotations

import hashlib
import sys
from inspect import getsourcefile
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from kvcore.cache import EvictionPolicy
from kvcore.config.values import read_plugin
from kvcore.plugins import find_override
from kvcore.plugins.manager import Plugins
from kvcore.trace.fields import plain
from kvcore.workloads.files import file_digest
from kvcore_judge.protocol import Panel
from kvcore_lab.sweep.sources import class_digests, kvcore_digest

OWN_FILE = "__main__"
"""The name that `class_digests` has for the file of a policy that is in no package."""


@attrs.frozen
class Entry:
    """A policy of a leaderboard.

    Attributes:
        text: a name with options (`lfu:half_life=300`), the path of a file (`policy.py`), or
            a class in one (`policy.py:MyPolicy`).
    """

    text: str

    @property
    def path(self) -> Path | None:
        """The file of the policy, by the rules of `Plugins.get`; None: it is installed.

        Raises:
            InputError: the text names no policy, or several.
        """
        name = read_plugin(self.text).name
        file = name if name.endswith(".py") else name.rpartition(":")[0]
        return Path(file) if file.endswith(".py") else None

    def tuned(self, panel: Panel, name: str) -> frozenset[str]:
        """Return the streams of `panel` on whose workload it was tuned, which has that `name`.

        A file was on none: it may call its policy as it likes.
        """
        return panel.tuned(name) if self.path is None else frozenset()

    def build(self) -> EvictionPolicy:
        """Return a new instance.

        Raises:
            InputError: there is no such policy, or no such file.
            PluginError: the file cannot be run, or has no policy or several.
        """
        policy: EvictionPolicy = Plugins().build("eviction", self.text)
        return policy

    @property
    def looks_ahead(self) -> bool:
        """Whether it defines a method that is called before a request is served."""
        return find_override(self.build(), "on_queued") is not None

    def describe(self) -> dict[str, Any]:
        """Return name, options and the digest of the source, as a leaderboard has them.

        Raises:
            InputError: a file was edited after this process had loaded it.
        """
        policy = self.build()
        options = policy.options()
        source = b"".join(path.read_bytes() for path in source_files(type(policy)))
        others = {
            name: file_digest(value)
            for name, value in options.items()
            if isinstance(value, Path) and value.is_file()
        }
        code = class_digests(type(policy))
        if self.path is not None and OWN_FILE in code:
            others |= {name: digest for name, digest in code.items() if name != OWN_FILE}
        source += "".join(f"{name} {others[name]}\n" for name in sorted(others)).encode()
        return {
            "entry": self.text if self.path is None else self.path.name,
            "name": policy.name or type(policy).__name__,
            "options": plain(options),
            "source": hashlib.blake2b(source, digest_size=16).hexdigest(),
        }

    def code(self) -> dict[str, str]:
        """Return the digests of all code that its cells depend on, beside the description.

        They are those of one machine: of a package they have compiled modules, too.
        """
        return {"kvcore": kvcore_digest(), **class_digests(type(self.build()))}


def source_files(kind: type) -> list[Path]:
    """Return the file of a class, and those of its package whose names its file imports.

    So does a module that it imports whole. Theirs count too. The file of the class comes first,
    the others by the names of modules.
    """
    package = f"{kind.__module__.rpartition('.')[0]}."
    modules, unread = {kind.__module__}, [kind.__module__]
    while unread:
        values = vars(sys.modules[unread.pop()]).values()
        names = {
            value.__name__
            if isinstance(value, ModuleType)
            else getattr(value, "__module__", None)
            for value in values
        }
        new = {str(name) for name in names if str(name).startswith(package)} - modules
        unread += new
        modules |= new
    others = sorted(modules - {kind.__module__})
    files = [getsourcefile(kind), *(sys.modules[name].__file__ for name in others)]
    return [Path(file) for file in files if file is not None]
