"""Distributions in a directory, as if they were installed there."""

from importlib.metadata import Distribution


def install(site, name, points, version="1.0", **files):
    """Install a distribution with entry points, and JSON files, in `site`; return the points.

    `points` are pairs of names and values.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = "".join(f"{key} = {value}\n" for key, value in points)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[kvcore]\n{lines}")
    for file, text in files.items():
        (info / f"{file}.json").write_text(text)
    return list(Distribution.at(info).entry_points)


def install_module(site, name, module, source, **files):
    """Install a distribution of one module, to which its entry point of that name leads."""
    (site / f"{module}.py").write_text(source)
    return install(site, name, [(module, module)], **files)
