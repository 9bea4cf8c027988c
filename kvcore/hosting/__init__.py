"""Policies in engines: the host of a policy for blocks that the engine owns, and a recorder."""

from kvcore.hosting.host import Block, PolicyHost
from kvcore.hosting.recorder import EngineRecorder
from kvcore.hosting.settings import HostSettings

__all__ = ["Block", "EngineRecorder", "HostSettings", "PolicyHost"]
