"""Tiers with random rules, as text for kvcore and as a dict for a slow model."""

from hypothesis import strategies as st


def random_tiers(slots, bytes_per_second):
    """Return a strategy of one or two tiers, nearest first, of these sizes and speeds."""
    bandwidths = st.sampled_from(bytes_per_second)
    return st.lists(
        st.fixed_dictionaries({
            "slots": st.sampled_from(slots),
            "write": st.sampled_from(("evict", "through", 1, 2)),
            "keep": st.sampled_from(("inclusive", "exclusive")),
            "load": st.sampled_from(("cost", "always", "never")),
            "read_bandwidth": bandwidths,
            "write_bandwidth": bandwidths,
            "latency": st.sampled_from((0, 30)),
            "max_wait": st.sampled_from((10**9, 100, 0)),
        }),
        min_size=1,
        max_size=2,
    )  # fmt: skip


def tier_text(tier, slot):
    """Return the specification of a tier whose slots have `slot` bytes."""
    options = {name: tier[name] for name in ("write", "keep", "load")}
    options |= {name: tier[name] for name in ("read_bandwidth", "write_bandwidth")}
    options |= {name: tier[name] / 10**9 for name in ("latency", "max_wait")}
    listed = ",".join(f"{name}={value}" for name, value in options.items())
    return f"host:memory={tier['slots'] * slot},{listed}"


def prefill_ns(tokens, context):
    """Return the ns to compute `tokens` tokens, which grow with the context."""
    return 7 * tokens + (tokens * (2 * context + tokens)) // 3
