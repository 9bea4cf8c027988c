"""The built-in schedulers pass the tests that every scheduler must pass."""

from helpers.configurations import configured
from helpers.seeds import FewSeeds

from kvcore.testing import SchedulerTests

STARVES = {
    "fair": False,
    "fair:prefill_weight=0.5,decode_weight=3": False,
    "fcfs": False,
    "lpm": True,
    "lpm:sample=2": True,
    "priority": True,
    "priority:preemptive=true": True,
    "priority:ageing=1": False,
    "priority:ageing=1,preemptive=true": False,
    "sjf": True,
    "sjf:length=true": True,
    "slo": True,
    "slo:preemptive=true": True,
    "slo:ttft=0.1,tpot=0.02": True,
    "srpt": True,
    "srpt:length=predicted,error=1": True,
    "srpt:preemptive=false": True,
}
"""Every configuration under test, and whether jobs may starve."""

KNOW_LENGTHS = {"sjf:length=true", "srpt", "srpt:preemptive=false"}
"""Those that go by the true lengths of outputs, as no server can."""


def _declared(spec):
    return {"starves": STARVES[spec], "knows_lengths": spec in KNOW_LENGTHS}


BuiltIn = configured("scheduler", STARVES, _declared, defaults=True)


class TestBuiltIn(FewSeeds, BuiltIn, SchedulerTests):
    """Every configuration in the list above."""
