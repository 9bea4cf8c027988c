"""Properties of tables: what a file looks like does not change what it means."""

import gzip
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from kvcore.plugins.manager import Plugins
from kvcore.workloads import find_workload

UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
EPOCH_NS = 1_763_600_000 * 10**9

rows = st.lists(
    st.tuples(st.integers(0, 3 * 10**6), st.integers(1, 5_000), st.integers(1, 500)),
    min_size=1,
    max_size=40,
    unique_by=lambda row: row[0],
)
"""Start in ms, and lengths of requests."""


def written(value, unit):
    """Return a time in ns as an exact number of a unit."""
    whole, rest = divmod(value, UNITS[unit])
    digits = len(str(UNITS[unit])) - 1
    return f"{whole}.{rest:0{digits}d}" if rest else f"{whole}"


def read(data):
    """Return arrivals and lengths of the requests in a file of these bytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        path.write_bytes(data)
        workload = find_workload(str(path), Plugins())
        return [(r.arrival, r.prompt_tokens, r.output_tokens) for r in workload]


@given(
    rows=rows,
    order=st.permutations(range(4)),
    unit=st.sampled_from([*UNITS]),
    shift=st.sampled_from([0, 77 * 10**9, EPOCH_NS]),
    end=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
    compressed=st.booleans(),
    data=st.data(),
)
def test_forms_of_a_table_mean_the_same(rows, order, unit, shift, end, mark, compressed, data):
    """Orders of columns and rows, units by name, a constant, and encodings change nothing."""
    expected = sorted(rows)
    first = expected[0][0]
    shuffled = data.draw(st.permutations(rows))
    names = [f"start_time_{unit}", "input_tokens", "output_tokens", "model"]
    lines = [names] + [
        [written(start * 10**6 + shift, unit), str(prompt), str(output), "m"]
        for start, prompt, output in shuffled
    ]
    text = "".join(",".join(line[n] for n in order) + end for line in lines)
    content = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
    assert read(gzip.compress(content) if compressed else content) == [
        ((start - first) * 10**6, prompt, output) for start, prompt, output in expected
    ]


@given(rows=rows, unit=st.sampled_from([*UNITS]))
def test_times_since_1970_have_the_unit_of_their_size(rows, unit):
    """Whole numbers of any unit since 1970 are told apart by their size."""
    rows = [(EPOCH_NS + start * 10**9, 5, 5) for start, *_ in rows]
    first = min(start for start, *_ in rows)
    lines = [f"{start // UNITS[unit]},{prompt},{output}\n" for start, prompt, output in rows]
    text = "time,input,output\n" + "".join(lines)
    assert read(text.encode()) == [(start - first, 5, 5) for start, *_ in sorted(rows)]
