"""Compiles the hot path with mypyc, for those who ask for it with KVCORE_COMPILE=1."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "KVCORE_COMPILE"
GROUP = "kvcore"
"""Names the library that holds all compiled code, `kvcore__mypyc`."""

MODULES = (
    "kvcore/cache/hints.py",
    "kvcore/cache/kvcache.py",
    "kvcore/cache/layout.py",
    "kvcore/cache/pool.py",
    "kvcore/cache/residency.py",
    "kvcore/cache/sequence.py",
    "kvcore/cache/span.py",
    "kvcore/cache/tree.py",
    "kvcore/histogram.py",
    "kvcore/serving/batcher.py",
    "kvcore/serving/decode_batch.py",
    "kvcore/serving/job.py",
    "kvcore/serving/loop.py",
    "kvcore/serving/service_times.py",
    "kvcore/serving/stats.py",
)
"""What every request and every step go through, and what these read.

The base classes of plugins stay Python, since plugins in Python derive from them. Compiled code
refuses an argument of another type by itself, in words of its own: what a user gives has types
that allow everything to the compiler, and is checked in ours (`kvcore/compiled.py`).
"""


class Compile(BuildHookInterface):
    """Adds compiled modules to a wheel, beside their sources, if that is asked for.

    A wheel without them is for every platform, one with them for that of its compiler. An
    editable install is never compiled: its sources are to be changed.
    """

    def dependencies(self) -> list[str]:
        """Return what compiling needs: the compiler, and what the modules import."""
        if not self._wanted("standard"):
            return []
        return ["mypy[mypyc]>=2.4", "setuptools", *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and add to the wheel what came out.

        Raises:
            RuntimeError: no compiler is found.
        """
        if not self._wanted(version):
            return
        compiler = (sysconfig.get_config_var("CC") or "cl").split()[0]
        if shutil.which(compiler) is None:
            msg = (
                f"{VARIABLE} asks for compiled modules, and the C compiler {compiler!r} is not "
                f"found: install one, or build without {VARIABLE}"
            )
            raise RuntimeError(msg)
        for library, place in self._compiled():
            build_data["force_include"][str(library)] = place
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def _wanted(self, version: str) -> bool:
        asked = os.environ.get(VARIABLE, "0") not in {"", "0"}
        return asked and self.target_name == "wheel" and version == "standard"

    def _compiled(self) -> list[tuple[Path, str]]:
        """Compile `MODULES`; return the libraries, and where each goes in the wheel."""
        from mypyc.build import mypycify  # noqa: PLC0415 - what compiling needs
        from setuptools import Distribution  # noqa: PLC0415
        from setuptools.command.build_ext import build_ext  # noqa: PLC0415

        target = Path(self.root) / "build" / "compiled"
        os.environ["MYPYPATH"] = "plugins"
        options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
        options += ["--always-true=COMPILING"]
        modules = mypycify(
            [*options, *MODULES],
            opt_level="3",
            group_name=GROUP,
            target_dir=str(target / "c"),
        )
        command = build_ext(Distribution({"name": "kvcore", "ext_modules": modules}))
        command.build_lib = str(target / "lib")
        command.build_temp = str(target / "objects")
        command.ensure_finalized()
        command.run()
        found = [Path(path) for path in command.get_outputs()]
        return [(path, path.relative_to(target / "lib").as_posix()) for path in found]
