"""`kvcore new`: write a package with a plugin, to begin with."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree

import click

from kvcore.errors import InputError
from kvcore.files import atomic_file, make_directory
from kvcore.plugins import Plugins
from kvcore_cli.verb import echo, verb
from kvcore_lab.templates.package import KITS, package_files


@verb("kvcore new eviction my-policy", "kvcore new router my-router --dir ~/src")
@click.argument("kind", type=click.Choice(list(KITS)), metavar="KIND")
@click.argument("name")
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    metavar="DIR",
    help="Directory in which the package is made.",
)
def new(kind: str, name: str, folder: Path) -> None:
    """Write a package with a plugin of KIND, called NAME: kvcore-NAME.

    The package has a module with the plugin, which works, its entry point, and a test that
    runs the conformance kit of kvcore. KIND is eviction, prefix, retention, scheduler, rules,
    checkpoint, latency, backend, codec, tier, generator, workload, router or drafter.
    """
    files = package_files(kind, name)
    if name in Plugins().names(kind):
        msg = f"{kind} plugin {name!r} exists: give another name"
        raise InputError(msg)
    package = folder.expanduser() / f"kvcore-{name}"
    if package.exists():
        msg = f"{package} exists: give another name, or another --dir"
        raise InputError(msg)
    try:
        for path, text in files.items():
            make_directory((package / path).parent)
            with atomic_file(package / path) as file:
                file.write(text)
    except BaseException:  # half a package would be in the way of the next attempt
        rmtree(package, ignore_errors=True)
        raise
    echo(f"{package}: {', '.join(files)}")
    echo(f"Next: cd {package} && pip install -e '.[test]' && pytest")
