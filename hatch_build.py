"""Builds the core in C while kvcore is installed, where a compiler is found.

A wheel with it is for the platform and the Python of its compiler; without a compiler, or with
`KVCORE_PURE=1`, it is pure Python. An editable install gets the library beside its sources.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildCore(BuildHookInterface):
    """Adds the library of `kvcore/native` to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library; say why not, and go on, if that cannot be done."""
        if os.environ.get("KVCORE_PURE", "0") not in {"", "0"}:
            return
        build = runpy.run_path(str(Path(self.root, "kvcore", "native", "build.py")))
        folder = build["FOLDER"] if version == "editable" else Path(mkdtemp("kvcore"))
        problem = build["build"](folder)
        if problem:
            first = problem.partition("\n")[0]
            self.app.display_info(f"kvcore is installed without its core in C: {first}")
            return
        if version != "editable":
            name = build["library_name"]()
            build_data["force_include"][str(folder / name)] = f"kvcore/native/{name}"
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
