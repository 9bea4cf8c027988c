"""Options of built-in workloads, given as text."""

from kvcore.plugins.manager import Plugins
from kvcore_plugins import hooks
from kvcore_plugins.workload import Zipf


def test_options_given_as_text_are_converted():
    """Options given as text are converted to their types, `key_tokens` included."""
    plugins = Plugins(extra=[hooks], entry_points=[])
    workload = plugins.build("workload", "zipf:requests=3,rate=2,key_tokens=32")
    assert workload.options() == Zipf(requests=3, rate=2.0, key_tokens=32).options()
