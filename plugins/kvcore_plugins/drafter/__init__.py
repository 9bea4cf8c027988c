"""Built-in drafters."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.drafter.acceptance import Acceptance
else:
    __getattr__, __dir__ = deferred(__name__, {"acceptance": "Acceptance"})

__all__ = ["Acceptance"]
