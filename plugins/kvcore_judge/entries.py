"""A policy to judge: a name with options, or a class in a file."""

from __future__ import annotations

import hashlib
import sys
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from inspect import getsourcefile
from pathlib import Path
from typing import Any

import attrs

from kvcore.cache import EvictionPolicy
from kvcore.errors import InputError, PluginError
from kvcore.plugins.base import FAILURES
from kvcore.plugins.manager import Plugins
from kvcore.trace.fields import plain


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
        """The file of the policy; None if it is an installed plugin."""
        path, _, _ = self.text.partition(".py")
        return Path(f"{path}.py") if ".py" in self.text else None

    def build(self) -> EvictionPolicy:
        """Return a new instance.

        Raises:
            InputError: there is no such policy, or the file has none or several.
            PluginError: the file cannot be run, or the class not be built.
        """
        path = self.path
        if path is None:
            policy: EvictionPolicy = Plugins().build("eviction", self.text)
            return policy
        return policy_class(path, self.text.partition(".py")[2].removeprefix(":"))()

    def describe(self) -> dict[str, Any]:
        """Return name, options and the digest of the source, as a leaderboard has them."""
        policy = self.build()
        file = getsourcefile(type(policy))
        source = b"" if file is None else Path(file).read_bytes()
        return {
            "entry": self.text if self.path is None else self.path.name,
            "name": policy.name or type(policy).__name__,
            "options": plain(policy.options()),
            "source": hashlib.blake2b(source, digest_size=16).hexdigest(),
        }


@lru_cache(maxsize=64)
def policy_class(path: Path, name: str = "") -> type[EvictionPolicy]:
    """Return the eviction policy in a Python file, which is run; its only one without `name`.

    Raises:
        InputError: there is no such file, or it has no such class, or several.
        PluginError: the file cannot be run.
    """
    if not path.is_file():
        msg = f"{path}: there is no such file; give a Python file with an eviction policy"
        raise InputError(msg)
    module_name = (
        f"kvcore_judged_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    )
    spec = spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except FAILURES as error:
        msg = f"{path} cannot be run: {type(error).__name__}: {error}"
        raise PluginError(msg) from error
    classes = {
        each.__name__: each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, EvictionPolicy)
        and each.__module__ == module_name
    }
    if name:
        classes = {name: classes[name]} if name in classes else {}
    if len(classes) != 1:
        found = ", ".join(classes) or "none"
        which = f"class {name!r}" if name else "one class derived from EvictionPolicy"
        msg = f"{path}: {which} is needed, and there is {found}; FILE.py:CLASS names one"
        raise InputError(msg)
    return next(iter(classes.values()))
