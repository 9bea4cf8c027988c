"""The table of formats: which files are of one workload alone, without an import of others."""

import sys

import pytest

from kvcore.plugins.manager import Plugins
from kvcore.workloads import find_workload, recognise

PLUGINS = Plugins()
FORMATS = PLUGINS.formats()
VALUES = {"hash_ids": "[1, 2]", "TIMESTAMP": "2023-11-16 18:15:46", "timestamp": "27"}
"""Values of the fields that are no number of tokens."""

SURE = [(name, fields) for name, formats in FORMATS.items() for fields in formats]


def lines_of(fields):
    """Return the first lines of a file with these fields: JSON, or CSV in upper case."""
    values = {name: VALUES.get(name, "16") for name in sorted(fields)}
    if "TIMESTAMP" in fields:
        return f"{','.join(values)}\n{','.join(values.values())}\n"
    cells = ", ".join(f'"{name}": {value}' for name, value in values.items())
    return f"{{{cells}}}\n" * 3


@pytest.fixture(params=SURE, ids=[name for name, _ in SURE])
def file(request, tmp_path):
    """Return the name of a workload, and a file of it."""
    name, fields = request.param
    path = tmp_path / "requests"
    path.write_text(lines_of(fields))
    return name, path


def test_all_classes_agree_with_the_table(file):
    """Of all classes the one that the table names recognises a file, and no other does."""
    name, path = file
    assert recognise(path, PLUGINS.classes("workload").values()).name == name


def test_a_file_is_found_without_the_import_of_other_formats(file, monkeypatch):
    """A file in the table is read by its workload; those of other entries are not loaded."""
    name, path = file
    others = {cls.__module__ for cls in PLUGINS.classes("workload", FORMATS).values()}
    for module in others:
        monkeypatch.delitem(sys.modules, module)
    found = find_workload(str(path), Plugins())
    assert found.name == name
    assert others & {*sys.modules} == {type(found).__module__}


@pytest.mark.parametrize("line", ['{"prompt": "hello"}', "not JSON"])
def test_a_file_with_other_lines_is_recognised_by_all_classes(tmp_path, line):
    """A file with one line of other fields is recognised by the votes of all classes."""
    path = tmp_path / "requests"
    path.write_text(lines_of(FORMATS["mooncake"][0]) + line)
    plugins = Plugins()
    assert find_workload(str(path), plugins).name == "mooncake"
    assert all(isinstance(cls, type) for cls, _ in plugins._find("workload").values())
