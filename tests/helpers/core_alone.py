"""Makes a tree of the core, the built-in plugins and the command line, and compares its runs.

    python tests/helpers/core_alone.py FOLDER

A first call, with all packages installed, makes the tree in FOLDER, which must not exist, and
keeps the JSON of a few runs there. A second one, with that tree installed in their place, fails
if the JSON of the same runs is another.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

RUNS = [
    "--limit 2000",
    "--limit 2000 --device h200 --like vllm",
    "zipf:requests=300,rate=20 --scheduler srpt --eviction lfu --blocks 3000",
    "zipf:requests=300,rate=200 --tensor-parallel 1",
]
"""Arguments of `kvcore simulate`. The load of the last run is higher than its server."""

ADDED = {"command", "cost", "rates", "savings", "turns", "wall_s"}
"""Fields that other packages add, the words of the command line, and the time of the run."""


def copy_core(target):
    """Copy the files of these, and what builds a wheel of them."""
    unwanted = shutil.ignore_patterns("__pycache__")
    for folder in ("kvcore", "plugins/kvcore_plugins", "plugins/kvcore_cli"):
        shutil.copytree(ROOT / folder, target / folder, ignore=unwanted)
    for name in ("LICENSE", "README.md", "hatch_build.py"):
        shutil.copy(ROOT / name, target)
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for left_out in (
        r'^ *(\w+ = )?"(plugins/)?kvcore_(?!plugins|cli)\w+(\.hooks)?",?\n',
        r"^\[project\.optional-dependencies\].*?(?=^\[)",
    ):
        project = re.sub(left_out, "", project, flags=re.DOTALL | re.MULTILINE)
    (target / "pyproject.toml").write_text(project, "utf-8")


def documents(*options):
    """Return the JSON documents of `RUNS`, as far as the core makes them."""
    simulate = [sys.executable, "-P", "-m", "kvcore", "simulate", "--json", *options]
    outputs = [
        subprocess.run([*simulate, *run.split()], stdout=subprocess.PIPE, check=True).stdout
        for run in RUNS
    ]
    read = [json.loads(output) for output in outputs]
    return [{name: run[name] for name in run if name not in ADDED} for run in read]


def main(folder):
    """Make the tree with the runs of the whole, or compare them with those of the core."""
    runs = folder / "runs.json"
    if not folder.exists():
        copy_core(folder)
        # The core has no search for a load that its server can take.
        runs.write_text(json.dumps(documents("--no-search")), "utf-8")
        return
    whole = json.loads(runs.read_text("utf-8"))
    for run, here, there in zip(RUNS, documents(), whole, strict=True):
        if here != there:
            sys.exit(f"kvcore simulate {run} --json: the core alone prints another document")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
