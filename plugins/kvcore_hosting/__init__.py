"""Eviction policies in engines that own their blocks: a host for the policy, and a recorder.

A library without hooks. Adapters call it inside an engine: `plugins/kvcore-vllm`, `-sglang` and
`-lmcache`, which are distributions of their own. To read, in this order::

    host.py       calls the policy for the blocks of an engine, and returns its victims
    groups.py     lets a policy order the cached blocks of cache groups
    recorder.py   writes the decisions of the engine as a trace
    settings.py   the policy and the trace that environment variables name
"""

from kvcore_hosting.host import Block, PolicyHost
from kvcore_hosting.recorder import EngineRecorder
from kvcore_hosting.settings import HostSettings

__all__ = ["Block", "EngineRecorder", "HostSettings", "PolicyHost"]
