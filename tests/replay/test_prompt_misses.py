"""The reasons why an API read no more of a prompt, each in the shortest log that has it."""

from __future__ import annotations

import pytest
from helpers.billing import logged, request, requests

from kvcore.errors import InputError
from kvcore.units import NS_PER_S
from kvcore_plugins.workload.usage import Usage
from kvcore_replay.misses import prompts as prompt_misses
from kvcore_replay.misses.prompts import REASONS, explain_prompts
from kvcore_replay.report.billing import PromptReport

AUTOMATIC = "input=4,cached=1,ttl=300"
EXPLICIT = "input=4,cached=1,write=5,ttl=300,breakpoints=4"


@pytest.fixture(autouse=True)
def _short_edits(monkeypatch):
    """Make two repeated tokens enough for an edit."""
    monkeypatch.setattr(prompt_misses, "EDIT_TOKENS", 2)


def unread(*served, price=AUTOMATIC):
    """Return (reason, first, tokens) of each unread part of the last prompt."""
    last = explain_prompts(served, price).prompts[-1]
    return [(part.reason, part.first, part.tokens) for part in last.unread]


def test_prompts_below_the_minimum_length_are_never_cached():
    """Prompts below the minimum length are never cached, however often they are sent."""
    rows = requests((0, "ab"), (1, "ab"))
    assert unread(*rows, price=f"{AUTOMATIC},min_tokens=3") == [("short", 0, 2)]


def test_the_older_rest_of_a_renewed_prefix_is_lapsed():
    """A prefix renewed by another request is read; the older rest of it is `lapsed`."""
    rows = requests((0, "abcd"), (250, "abx"), (400, "abcd"))
    assert unread(*rows) == [("lapsed", 2, 2)]


def test_tokens_without_a_breakpoint_after_them_are_unmarked():
    """Tokens of earlier prompts are `unmarked` if no breakpoint or whole step follows them."""
    rows = requests((0, "abcd"), (1, "abce"))
    assert unread(*rows, price=EXPLICIT) == [("unmarked", 0, 3), ("new", 3, 1)]
    assert unread(*rows, price=f"{AUTOMATIC},step=2") == [("unmarked", 2, 1), ("new", 3, 1)]


def test_a_prompt_that_repeats_tokens_after_a_difference_is_edited():
    """A prompt that repeats tokens after its first difference is `edited`, with the place."""
    rows = [
        logged(0, 0, ("xab", None), ("cd", None)),
        logged(1, 9, ("yab", None), ("cde", None)),
    ]
    (edited, new) = explain_prompts(rows, AUTOMATIC).prompts[-1].unread
    assert (edited.reason, edited.first, edited.tokens) == ("edited", 0, 4)
    assert (edited.other, edited.gap_ns) == (0, 9 * NS_PER_S)
    assert edited.place == "messages[0], after token 0"
    assert (new.reason, new.tokens) == ("new", 2)


def test_the_prefix_before_an_edit_is_read_with_automatic_caching():
    """The prefix before an edit is read with automatic caching.

    With breakpoints alone nothing of it is read, and it counts as edited.
    """
    rows = [
        logged(0, 0, ("ab", None), ("xcdef", None)),
        logged(1, 1, ("ab", None), ("ycdef", None)),
    ]
    assert unread(*rows) == [("edited", 2, 4), ("new", 6, 1)]
    assert unread(*rows, price=EXPLICIT) == [("edited", 0, 6), ("new", 6, 1)]
    assert explain_prompts(rows, AUTOMATIC).prompts[1].unread[0].place == (
        "messages[1], after token 2"
    )


def test_a_dropped_message_is_an_edit():
    """Dropping a message is an edit: the messages after it are sent again and not read."""
    rows = [
        logged(0, 0, ("ab", None), ("12", None), ("cdef", None)),
        logged(1, 1, ("ab", None), ("cdef", None), ("g", None)),
    ]
    assert unread(*rows) == [("edited", 2, 4), ("new", 6, 1)]


def test_the_original_of_an_edit_may_not_be_the_latest_prompt():
    """The original of an edit is found even if a later prompt has the same prefix."""
    rows = [
        logged(0, 0, ("abcdefgh", None), ("m", None), ("1234", None)),
        logged(1, 1, ("abcdefgh", None), ("z", None)),
        logged(2, 2, ("abcdefgh", None), ("1234", None), ("n", None)),
    ]
    (edited, _) = explain_prompts(rows, AUTOMATIC).prompts[-1].unread
    assert (edited.reason, edited.tokens, edited.other) == ("edited", 4, 0)


def test_a_prompt_that_repeats_less_than_half_is_no_edit():
    """A prompt that repeats less than half of another after the difference is not its edit."""
    rows = [logged(0, 0, ("xabcdef", None)), logged(1, 1, ("yab123", None))]
    assert unread(*rows) == [("new", 0, 6)]


def test_originals_are_searched_among_recent_prompts_only(monkeypatch):
    """Originals of edits are searched among the last RECENT prompts only."""
    monkeypatch.setattr(prompt_misses, "RECENT", 1)
    rows = [
        logged(0, 0, ("xabcd", None)),
        logged(1, 1, ("z", None)),
        logged(2, 2, ("yabcd", None)),
    ]
    assert unread(*rows) == [("new", 0, 5)]


def test_an_edit_of_a_lapsed_original_is_undetermined():
    """An edit is `undetermined` if the TTL of its original had lapsed anyway."""
    rows = [logged(0, 0, ("xabcd", None)), logged(1, 300, ("yabcd", None))]
    assert unread(*rows) == [("undetermined", 0, 4), ("new", 4, 1)]


def test_a_prompt_to_another_model_is_no_original():
    """A prompt to another model is not the original of an edit."""
    rows = [logged(n, n, (f"{n}abcd", None), salt=f"m{n}") for n in range(2)]
    assert [reason for reason, *_ in unread(*rows)] == ["new"]


def test_unread_tokens_within_the_ttl_were_evicted():
    """Tokens that the rule reads within the TTL, but the log does not, were `evicted`."""
    rows = [logged(n, n, ("abcd", 0), usage=Usage(400)) for n in range(2)]
    (gone,) = explain_prompts(rows, EXPLICIT).prompts[-1].unread
    assert (gone.reason, gone.tokens, gone.other) == ("evicted", 400, 0)
    assert gone.gap_ns == NS_PER_S


@pytest.mark.parametrize(("read", "evicted"), [(359, True), (360, False), (400, False)])
def test_reading_a_tenth_less_than_expected_is_no_eviction(read, evicted):
    """Reading up to a tenth less than expected is no eviction, as positions are estimates."""
    rows = [logged(n, n, ("abcd", 0), usage=Usage(400 - read, read)) for n in range(2)]
    reasons = [("evicted", read, 400 - read)] if evicted else [("new", read, 400 - read)]
    assert unread(*rows, price=EXPLICIT) == reasons[: 400 - read]


def test_tokens_that_the_log_reports_as_read_have_not_lapsed():
    """Tokens that the log reports as read are read, even if their TTL has lapsed."""
    rows = [logged(n, 400 * n, ("abcd", 0), usage=Usage(4 - 4 * n, 4 * n)) for n in range(2)]
    last = explain_prompts(rows, EXPLICIT).prompts[-1]
    assert (last.expected, last.reported, last.read, last.unread) == (0, 4, 4, [])
    assert last.as_dict()["read_tokens"] == 4


def test_a_step_more_or_less_than_the_rule_reads_is_no_difference():
    """A report counts what a log reads up to a step more or less as about as much.

    It says which requests have no report.
    """
    served = [None, Usage(10, 90), Usage(0, 100), Usage(61, 39)]
    rows = [logged(n, n, ("a" * 100, None), usage=usage) for n, usage in enumerate(served)]
    report = PromptReport(explain_prompts(rows, f"{AUTOMATIC},step=40"))
    counts = "1 request read less than the rule says, 0 more, 2 about as much."
    assert report.agreement == f"The rule reads 240 tokens, the log 229. {counts}"
    assert "as the log reports, or by the API's rule where it does not" in report.headline


def test_every_token_has_one_reason():
    """Read and unread parts cover each prompt once, and the sums count each part once.

    So they do if a log reports that all of an edited prompt was read.
    """
    blocks = [((f"{'xyz'[n % 3]}ab", 0), ("cd" + "efgh"[: n % 5], 0)) for n in range(20)]
    rows = [
        logged(n, 70 * n, *of, usage=Usage(0, 500) if n % 4 == 3 else None)
        for n, of in enumerate(blocks)
    ]
    for price in (AUTOMATIC, EXPLICIT, f"{EXPLICIT},min_tokens=6"):
        found = explain_prompts(rows, price)
        for prompt in found.prompts:
            ends = [part.first + part.tokens for part in prompt.unread]
            starts = [part.first for part in prompt.unread]
            assert starts == [prompt.read, *ends[:-1]][: len(starts)]
            assert [prompt.read, *ends][-1] == prompt.tokens
        sums = found.sums()
        assert set(sums) == set(REASONS)
        unread_tokens = sum(prompt.tokens - prompt.read for prompt in found.prompts)
        assert sum(row["tokens"] for row in sums.values()) == unread_tokens
        assert sum(row["stopped"] for row in sums.values()) == sum(
            prompt.tokens > prompt.read for prompt in found.prompts
        )


def test_an_unknown_request_is_refused_with_a_similar_name():
    """The error for an unknown request names it, the workload and a similar request."""
    found = explain_prompts([request("abc", 0, "a")], AUTOMATIC, source="log")
    assert found.of("abc").request == "abc"
    with pytest.raises(InputError, match=r"'abd' is not in log \(did you mean 'abc'"):
        found.of("abd")
