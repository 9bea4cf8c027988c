"""At home in engines: policies that decide about blocks which somebody else owns."""

from kvcore.hosting.host import Block, PolicyHost
from kvcore.hosting.recorder import EngineRecorder
from kvcore.hosting.settings import HostSettings

__all__ = ["Block", "EngineRecorder", "HostSettings", "PolicyHost"]
