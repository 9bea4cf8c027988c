"""What-if: the requests of a trace run again, and both runs side by side."""

from kvcore.lab.rerun.figures import Change, Fate, Figures
from kvcore.lab.rerun.whatif import WhatIf, whatif

__all__ = ["Change", "Fate", "Figures", "WhatIf", "whatif"]
