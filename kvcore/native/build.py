"""Builds the core in C, beside its sources: `python -m kvcore.native.build`.

The installation of kvcore does it where a compiler is found. The library knows of which sources
it was made, so that an editable install does not use one that is older than they are.
"""

from __future__ import annotations

import sys
from _blake2 import blake2b  # that of hashlib, which loads OpenSSL too
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = "residency.c", "tree.c", "decode_batch.c", "untimed.c", "loop.c"


def source_digest() -> str | None:
    """Return the digest of the C sources; None where there are none, as in a wheel."""
    digest = blake2b(digest_size=16)
    try:
        for name in ("core.h", *SOURCES):
            digest.update((FOLDER / name).read_bytes())
    except FileNotFoundError:
        return None
    return digest.hexdigest()


def library_name() -> str:
    """Return the name of the library for this Python."""
    import sysconfig  # noqa: PLC0415 - for a build alone, as below

    return f"_core{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"


def command(target: Path) -> list[str]:
    """Return the command that builds the library `target`."""
    import shlex  # noqa: PLC0415
    import sysconfig  # noqa: PLC0415

    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    shared = ["-bundle", "-undefined", "dynamic_lookup"]
    return [
        *compiler,
        *("-std=c11", "-O2", "-fPIC", "-fvisibility=hidden"),
        *(shared if sys.platform == "darwin" else ["-shared"]),
        f'-DKVCORE_SOURCE="{source_digest()}"',
        f"-I{sysconfig.get_paths()['include']}",
        *(str(FOLDER / name) for name in SOURCES),
        *("-o", str(target), "-lm"),
    ]


def build(folder: Path = FOLDER) -> str:
    """Build the library in `folder`; return "", or why that cannot be done."""
    import subprocess  # noqa: PLC0415

    if sys.platform == "win32" or sys.implementation.name != "cpython":
        return f"no core for {sys.implementation.name} on {sys.platform}"
    target = folder / library_name()
    partial = target.with_suffix(".partial")
    try:
        done = subprocess.run(  # noqa: S603 - the compiler of this Python
            command(partial), capture_output=True, text=True, check=False
        )
    except OSError as error:
        return str(error)
    if done.returncode:
        return done.stderr.strip() or f"the compiler ended with {done.returncode}"
    partial.replace(target)
    return ""


if __name__ == "__main__":
    sys.exit(build() or None)
