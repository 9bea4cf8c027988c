"""Built-in drafters."""

from typing import TYPE_CHECKING

from kvcore.lazy import deferred

if TYPE_CHECKING:
    from kvcore_plugins.drafter.acceptance import Acceptance
    from kvcore_plugins.drafter.draft_model import DraftModel
    from kvcore_plugins.drafter.medusa import Medusa
    from kvcore_plugins.drafter.prompt_lookup import PromptLookup
else:
    __getattr__, __dir__ = deferred(
        __name__,
        {
            "acceptance": "Acceptance",
            "draft_model": "DraftModel",
            "medusa": "Medusa",
            "prompt_lookup": "PromptLookup",
        },
    )

__all__ = ["Acceptance", "DraftModel", "Medusa", "PromptLookup"]
