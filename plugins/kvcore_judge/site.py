"""The workbench as a site of plain files: a page, Python for browsers, and kvcore.

Any server of files will do. Nothing is fetched from elsewhere: the runtime and the one wheel
that is not pure Python come from a folder, all else from what is installed here.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from hashlib import blake2b
from html import escape
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

import orjson

from kvcore.distributions import entry_points, version
from kvcore.errors import InputError, PluginError
from kvcore.files import atomic_file, make_directory
from kvcore_judge.workbench import choices

LOCK = "pyodide-lock.json"

RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
"""The files of Pyodide that a page loads, beside its lock."""

PURE = ("attrs", "pluggy", "structlog")
"""The distributions in pure Python that kvcore needs in the browser."""

PYODIDE = "314.0.7"
"""The release of Pyodide for which the site is made."""

TAG = "cp314-cp314-pyemscripten_2026_0_wasm32"
"""The tag of wheels for its Python."""

WHEEL = (
    "pip download --no-deps --only-binary=:all: --platform pyemscripten_2026_0_wasm32 "
    "--python-version 3.14 --implementation cp --abi cp314 msgspec"
)
"""The command that gets the one wheel that is not pure Python."""


def write_site(out: Path, runtime: Path) -> int:
    """Write the site to a folder, and return its size in bytes.

    Equal installations give equal bytes. Other files of the folder stay as they are.

    Args:
        out: the folder, which is made if it is missing.
        runtime: the folder of the npm package `pyodide`, with a wheel of msgspec for it.

    Raises:
        InputError: the runtime or the wheel is missing, or the folder cannot be written.
        PluginError: kvcore or something that it needs is not installed.
    """
    site = site_files(runtime)
    for name, data in site.items():
        make_directory((out / name).parent)
        with atomic_file(out / name) as file:
            file.buffer.write(data)
    return sum(map(len, site.values()))


def site_files(runtime: Path) -> dict[str, bytes]:
    """Return the content of each file of the site, by its path there."""
    info, wheel = _checked(runtime)
    site = {f"pyodide/{name}": (runtime / name).read_bytes() for name in RUNTIME}
    # Without packages, so that Python finds none that it could load from elsewhere.
    site[f"pyodide/{LOCK}"] = orjson.dumps({"info": info, "packages": {}})
    site["packages/kvcore.zip"] = _archive(_installed_files())
    site[f"packages/{wheel.name}"] = wheel.read_bytes()
    site["worker.js"] = _static("worker.js").encode()
    site["page.js"] = _static("page.js").encode()
    shell = (files("kvcore_pages") / "static" / "shell.css").read_text("utf-8")
    site["page.css"] = (shell + _static("page.css")).encode()
    options = "".join(
        f'<option value="{escape(name)}">{escape(text)}</option>'
        for name, text in choices().items()
    )
    page = Template(_static("page.html"))
    site["index.html"] = page.substitute(
        options=options, wheel=wheel.name, version=escape(version("kvcore") or "")
    ).encode()
    digest = blake2b(digest_size=8)
    for name, data in site.items():
        digest.update(name.encode() + data)
    listed = orjson.dumps(["./", *site]).decode()
    site["offline.js"] = (
        f'const VERSION = "{digest.hexdigest()}";\nconst FILES = {listed};\n'
        f"{_static('offline.js')}"
    ).encode()
    return site


def _checked(runtime: Path) -> tuple[dict[str, Any], Path]:
    """Return what the lock says of a folder's runtime, and the wheel of msgspec there."""
    missing = [name for name in (LOCK, *RUNTIME) if not (runtime / name).is_file()]
    if missing:
        msg = (
            f"--pyodide {runtime}: there is no {missing[0]}; `npm install pyodide@{PYODIDE}` "
            "makes the folder node_modules/pyodide, which has it"
        )
        raise InputError(msg)
    try:
        info: dict[str, Any] = orjson.loads((runtime / LOCK).read_bytes())["info"]
        python, abi = info["python"], info["abi_version"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        msg = f"--pyodide {runtime}: {LOCK} is not that of Pyodide {PYODIDE}: {error!r}"
        raise InputError(msg) from error
    if not str(python).startswith("3.14.") or f"_{abi}_" not in TAG:
        msg = (
            f"--pyodide {runtime}: it has Python {python} and the ABI {abi}; the site is made "
            f"for that of `npm install pyodide@{PYODIDE}`"
        )
        raise InputError(msg)
    wheels = sorted(runtime.glob(f"msgspec-*-{TAG}.whl"))
    if not wheels:
        msg = (
            f"--pyodide {runtime}: there is no wheel of msgspec for its Python; get it by "
            f"`{WHEEL} -d {runtime}`"
        )
        raise InputError(msg)
    return info, wheels[-1]


def _installed_files() -> dict[str, bytes]:
    """Return what Python needs in the browser, by its path in `site-packages`."""
    points = entry_points("kvcore", of="kvcore")
    if not points:
        msg = "kvcore is not installed, so that it cannot be packed; run `pip install -e .`"
        raise PluginError(msg)
    hooked = sorted({point.value.partition(".")[0] for point in points})
    packages = ["kvcore", "kvcore_cli", *hooked]  # the command line has no hooks
    files: dict[str, bytes] = {}
    for package in packages:
        files |= _package_files(package)
    for name in PURE:
        files |= _distribution_files(name)
    group = "".join(f"{point.name} = {point.value}\n" for point in points)
    about = f"Metadata-Version: 2.1\nName: kvcore\nVersion: {version('kvcore')}\n"
    files["kvcore.dist-info/METADATA"] = about.encode()
    files["kvcore.dist-info/entry_points.txt"] = f"[kvcore]\n{group}".encode()
    files["orjson.py"] = _static("json_for_orjson.py").encode()
    return files


def _package_files(package: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of an installed package but those of one machine, with their paths."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        root = Path(folder)
        for path in sorted(root.rglob("*")):
            if path.is_file() and _is_portable(path):
                yield f"{package}/{path.relative_to(root).as_posix()}", path.read_bytes()


def _distribution_files(name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a distribution, its licence too, with their paths."""
    try:
        listed = distribution(name).files or ()
    except PackageNotFoundError as error:
        msg = f"{name} is not installed, so that it cannot be packed: pip install {name}"
        raise PluginError(msg) from error
    for file in sorted(listed):
        path = Path(str(file.locate()))
        if ".." not in file.parts and path.is_file() and _is_portable(path):
            yield file.as_posix(), path.read_bytes()


def _is_portable(path: Path) -> bool:
    # A cache has compiled modules, and numba's kernels.
    return "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so", ".pyd", ".c")


def _archive(content: dict[str, bytes]) -> bytes:
    """Return files as a zip archive without times, so that equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in sorted(content.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _static(name: str) -> str:
    return (files("kvcore_judge") / "browser" / name).read_text("utf-8")
