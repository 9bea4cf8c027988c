"""pip, as tox calls it: `pip install`, but a torch for the CPU is taken where a folder has one.

Of packages with hashes pip prefers those of an index, whose links have theirs, to those of a
folder (`PIP_FIND_LINKS`): it would take torch for CUDA, of 3 GB. So torch is looked for in
folders first, with the hashes of the lock; where there is none, the index is asked as ever.
"""

import subprocess
import sys

PIP = [sys.executable, "-I", "-m", "pip", "install"]
LOCK = "tests/locked.txt"

if any(argument.startswith("torch>=") for argument in sys.argv):
    folders = [*PIP, "--quiet", "--no-index", "--no-deps", "torch", "--constraint", LOCK]
    subprocess.run(folders, check=False, stderr=subprocess.DEVNULL)
sys.exit(subprocess.run([*PIP, *sys.argv[1:]], check=False).returncode)
