"""Built-in drafters."""

from kvcore_plugins.drafter.acceptance import Acceptance
from kvcore_plugins.drafter.draft_model import DraftModel
from kvcore_plugins.drafter.medusa import Medusa
from kvcore_plugins.drafter.prompt_lookup import PromptLookup

__all__ = ["Acceptance", "DraftModel", "Medusa", "PromptLookup"]
