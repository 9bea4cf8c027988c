"""Policies in engines: the host of a policy for blocks that the engine owns, and a recorder."""

from kvcore_hosting.host import Block, PolicyHost
from kvcore_hosting.recorder import EngineRecorder
from kvcore_hosting.settings import HostSettings

__all__ = ["Block", "EngineRecorder", "HostSettings", "PolicyHost"]
