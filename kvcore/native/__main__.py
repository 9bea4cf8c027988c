"""Builds the core in C beside its sources: `python -m kvcore.native`."""

import sys

from kvcore.native.build import build

sys.exit(build() or None)
