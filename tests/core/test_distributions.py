"""`kvcore.distributions` finds the distributions that `importlib.metadata` finds."""

from __future__ import annotations

import os
import sys
import zipfile
from importlib import metadata

import pytest

from kvcore import distributions


def install(place, name, version="1.0", points="", end="dist-info", file="METADATA"):
    """Write the metadata of a distribution that is installed in `place`."""
    info = place / f"{name}-{version}.{end}"
    info.mkdir(parents=True)
    header = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n\n"
    (info / file).write_text(f"{header}Version: in the text\n")
    if points:
        (info / "entry_points.txt").write_text(points)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Return two directories, which alone are on `sys.path`: a text, and a path by mistake."""
    found = [tmp_path / "first", tmp_path / "second"]
    for place in found:
        place.mkdir()
    monkeypatch.setattr(sys, "path", [str(found[0]), found[1], str(tmp_path / "missing")])
    return found


def fields_of(points):
    """Return the fields of entry points, sorted."""
    return sorted((p.name, p.value, p.module, p.dist.name, p.dist.version) for p in points)


def agree():
    """Assert that `importlib.metadata` finds the same entry points; return their names."""
    found = fields_of(distributions.entry_points("kvcore"))
    assert found == fields_of(metadata.entry_points(group="kvcore"))
    return [name for name, *_ in found]


def test_distributions_of_this_environment_are_found():
    """Both find the same entry points and version in this environment."""
    assert "builtin" in agree()
    assert distributions.version("kvcore") == metadata.version("kvcore")


def test_distributions_installed_later_are_found(places):
    """Distributions that are installed or changed later are found."""
    install(places[0], "one", points="[kvcore]\nx = pack:Class\n")
    assert agree() == ["x"]
    install(places[0], "two", points="[kvcore]\ny = pack:Class\n")
    (places[0] / "one-1.0.dist-info/entry_points.txt").write_text("[kvcore]\nz = pack:Class\n")
    for changed in (places[0], *places[0].glob("*/entry_points.txt")):
        os.utime(changed, ns=(0, 10**18))  # successive changes may have equal times
    assert agree() == ["y", "z"]


def test_a_deleted_working_directory_has_no_entry_points(places, tmp_path, monkeypatch):
    """A deleted working directory on `sys.path` has no entry points and raises no error."""
    install(places[0], "one", points="[kvcore]\nx = pack:Class\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    gone.rmdir()
    assert [point.name for point in distributions.entry_points("kvcore")] == ["x"]


def test_entry_points_of_all_directories_and_eggs_are_found(places):
    """Entry points of all directories and eggs are found, without other groups and comments."""
    install(places[0], "one", points="[kvcore]\n# a = b\nx = pack:Class\n\n[other]\ny = z\n")
    install(places[0], "none", points="[console_scripts]\nkvcore = x:main\n")
    more = {"end": "egg-info", "file": "PKG-INFO", "points": "[kvcore]\nz=a.b:C.d\n"}
    install(places[1], "old_one", **more)
    assert agree() == ["x", "z"]


@pytest.mark.parametrize(
    ("points", "names"),
    [
        ("[kvcore] \nx = pack:Class\n", ["x"]),
        ("[other]\ny = pack\n  [kvcore]\n  x = pack:Class\n", ["x"]),
        ("[kvcore]\nx = pack\n[other]\ny = pack\n[kvcore]\nz = pack\n", ["x", "z"]),
        ("[kvcore]\r\nx = pack:Class\r\n\r\n[other]\r\ny = pack\r\n", ["x"]),
        ("[kvcore_other]\ny = pack\n", []),
    ],
)
def test_sections_may_be_indented_and_come_twice(places, points, names):
    """The header of a section may have blanks around it, and a section may come twice."""
    install(places[0], "one", points=points)
    assert agree() == names


def test_the_first_distribution_of_a_name_hides_others(places):
    """Of distributions with the same normalised name, only the first on the path counts."""
    install(places[0], "Some.Name")
    install(places[1], "some_name", "2.0", points="[kvcore]\nhidden = x\n")
    assert agree() == []
    assert distributions.version("some--name") == metadata.version("some-name") == "1.0"


def test_entry_points_with_extras_are_found(places):
    """Entry points with extras are found, by means of `importlib.metadata`."""
    install(places[0], "one", points="[kvcore]\nx = pack.mod : Class [extra]\n")
    assert agree() == ["x"]


def test_of_selects_one_distribution(places):
    """`of` selects the entry points of one distribution."""
    for name in ("one", "two"):
        install(places[0], name, points=f"[kvcore]\n{name} = x\n")
    assert fields_of(distributions.entry_points("kvcore", of="Two")) == [
        ("two", "x", "x", "two", "1.0")
    ]
    assert distributions.entry_points("kvcore", of="three") == []


def test_an_entry_point_loads_a_module_or_a_name(places):
    """An entry point loads a module or a name in it; a missing name raises AttributeError."""
    points = "[kvcore]\na = json\nb = os:path.join\nc = json:missing\n"
    install(places[0], "one", points=points)
    module, function, missing = distributions.entry_points("kvcore")
    assert (module.load().__name__, function.load().__name__) == ("json", "join")
    with pytest.raises(AttributeError, match="missing"):
        missing.load()


def test_distributions_in_a_zip_archive_are_found(places, tmp_path, monkeypatch):
    """Distributions in a zip archive on the path are found."""
    install(places[0], "zipped", points="[kvcore]\nz = x\n")
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(places[0].rglob("*")):
            file.write(path, path.relative_to(places[0]))
    monkeypatch.setattr(sys, "path", [str(archive)])
    assert agree() == ["z"]
    assert fields_of(distributions.entry_points("kvcore", of="zipped")) == [
        ("z", "x", "x", "zipped", "1.0")
    ]
    assert distributions.version("zipped") == "1.0"
    assert distributions.entry_points("kvcore", of="other") == []
    assert distributions.version("other") is None


def test_a_missing_distribution_has_no_version(places):
    """The version of a distribution that is not installed is None."""
    assert places
    assert distributions.version("kvcore") is None
