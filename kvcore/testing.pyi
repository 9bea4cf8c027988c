# For type checkers; when the program runs, `kvcore.moved` gives kvcore_testing this name.
from kvcore_testing import *  # noqa: F403
