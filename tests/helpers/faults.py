"""Plugins with a fault, and tests of a conformance kit that are called by hand."""

from inspect import signature


def faulty(fault, base, **members):
    """Return a plugin class that has a `fault`: `members`, which alone differ from `base`."""
    return type(f"Faulty{base.__name__}", (base,), {"__doc__": fault, **members})


def fail(*_, **__):
    """Raise ZeroDivisionError, whatever it is called with."""
    raise ZeroDivisionError


def run_test(kit, plugin, test, *arguments, **values):
    """Run a test of a kit on the plugins that `plugin()` returns.

    The test gets `arguments`, and those of `values` for which it has a parameter.
    """
    made = type("Kit", (kit,), {"make": lambda _: plugin()})()
    method = getattr(made, f"test_{test}")
    known = signature(method).parameters.keys() & values.keys()
    return method(*arguments, **{name: values[name] for name in known})
