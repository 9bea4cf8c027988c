"""The built-in retention policies."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.retention.full import Full
else:
    __getattr__, __dir__ = deferred(__name__, {"full": "Full"})

__all__ = ["Full"]
