"""Distributions in a directory, as if they were installed there."""


def install(site, distribution, module, source, **files):
    """Install a distribution with one module and one entry point of the same name in `site`."""
    (site / f"{module}.py").write_text(source)
    info = site / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[kvcore]\n{module} = {module}\n")
    for name, text in files.items():
        (info / f"{name}.json").write_text(text)
