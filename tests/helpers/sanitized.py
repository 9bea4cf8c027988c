"""Runs the tests of the core in C with sanitizers, in a copy of kvcore.

python tests/helpers/sanitized.py FOLDER [EXAMPLES]
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SANITIZERS = "-fsanitize=address,undefined"


def main(folder, examples="500"):
    """Build the core with sanitizers in a copy of the packages, and test it there."""
    copy = folder / "sanitized"
    shutil.rmtree(copy, ignore_errors=True)
    for name in ("kvcore", "plugins", "tests"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, copy / name, ignore=unwanted)
    paths = os.pathsep.join(str(copy / name) for name in (".", "plugins", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths}
    code = (
        "from kvcore.native import build; import subprocess;"
        "target = build.FOLDER / build.library_name();"
        f"subprocess.run([*build.command(target), '-g', {SANITIZERS!r}], check=True)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], env=environment, check=True)
    libraries = [
        subprocess.run(
            ["cc", f"-print-file-name={name}"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    # Python keeps objects until its end, which are no leaks; its own allocator would hide what
    # is read after it was freed.
    environment |= {
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
        "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": " ".join(libraries),
        "KVCORE_NATIVE_EXAMPLES": examples,
    }
    tests = [copy / "tests" / each for each in ("core/native", "plugins/test_plain_rows.py")]
    pytest = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-s",  # a sanitizer that ends the process has its say on stderr
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
    ]
    options = ["--rootdir", str(copy), "--import-mode=importlib", "-k", "not test_build"]
    raise SystemExit(subprocess.call([*pytest, *options, *map(str, tests)], env=environment))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
