"""The report that compares a contiguous run with a paged one."""

from kvcore_lab.report.paging import paging_sections

TIMES = {"mean": 1.5, "p99": 2.0}


def summary(*, running=2.0, **changes):
    """Return the summary of a run, with some values changed."""
    return {
        "completed": 1200,
        "rejected": 0,
        "throughput_tokens_s": 12.0,
        "ttft_s": TIMES,
        "pool": {"blocks": 100, "block_size": 16},
        "fragmentation": {
            "running": running,
            "used": 0.5,
            "cached": 0.25,
            "internal": 0.125,
            "uncomputed": 0.0625,
            "internal_peak": 0.2,
            "external": 0.3,
            "external_free": 0.4,
        },
    } | changes


def test_a_row_has_the_values_of_both_runs():
    """A row has a name, the value of the contiguous run, and that of the paged run."""
    rows = paging_sections(summary(), summary(running=3.0, completed=7), 8)[1].rows
    assert rows[:2] == [["running at a time", "2", "3"], ["completed", "1,200", "7"]]
    assert [row[1] for row in rows[-4:]] == ["12.5%", "6.2%", "30.0%", "40.0%"]


def test_missing_values_are_dashes():
    """Values that a run does not have, such as times without a served request, are dashes."""
    nothing = summary(throughput_tokens_s=None, ttft_s=None)
    nothing["fragmentation"]["external_free"] = None
    rows = paging_sections(nothing, summary(), 8)[1].rows
    assert [name for name, before, _ in rows if before == "–"] == [
        "generated tokens/s",
        "TTFT, mean",
        "TTFT, p99",
        "free at such times",
    ]


def test_the_reading_has_the_ratio_of_running_requests():
    """The reading has the ratio of requests running at a time, if paging runs more of them."""
    *_, reading = paging_sections(summary(), summary(running=3.0), 8)
    assert reading.startswith("Paging runs 1.50 times as many at a time.")
    for before, paged in ((0.0, 0.0), (3.0, 2.0)):
        *_, reading = paging_sections(summary(running=before), summary(running=paged), 8)
        assert reading.startswith("Splintered is")


def test_the_headline_has_memory_and_reserved_output():
    """The headline has the memory of both runs and the output that a request reserves."""
    headline, *_ = paging_sections(summary(), summary(), 2000)
    assert headline.startswith("The same memory of 1,600 tokens")
    assert "2,000 tokens of output" in headline
