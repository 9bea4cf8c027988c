"""Eviction policies of kvcore in LMCache: `cache_policy: kvcore:s3fifo`, or `kvcore`."""

from __future__ import annotations

from functools import partial

__all__ = ["register"]


def register() -> None:
    """Add `kvcore`, and `kvcore:<name>` for every policy, to LMCache's table of policies.

    The entry point in `vllm.general_plugins`; a second call changes nothing. Policies that
    cannot be hosted have names too: using one is an error with the reason.
    """
    # LMCache takes seconds to import: a server without it must not wait.
    from lmcache.v1.storage_backend.cache_policy import POLICY_MAPPING  # noqa: PLC0415

    from kvcore.plugins import Plugins  # noqa: PLC0415
    from kvcore_lmcache.policy import KvcorePolicy  # noqa: PLC0415

    POLICY_MAPPING["KVCORE"] = KvcorePolicy
    for name in Plugins().names("eviction"):
        POLICY_MAPPING[f"KVCORE:{name.upper()}"] = partial(KvcorePolicy, name)
