"""`BlockTracker`: the resident blocks by the KV events of an engine, and the anomalies."""

import pytest
from helpers.kv_events import batch, removed, stored
from hypothesis import given
from hypothesis import strategies as st

from kvcore_events.block_tracker import BlockLocation, BlockTracker
from kvcore_events.model import (
    AllBlocksCleared,
    BlockStored,
    BlockUpdated,
    EventBatch,
    Page,
    PagesStored,
    UnparsedEvent,
)


def follow(*batches, **options):
    """Return a tracker that has applied `batches`, numbered from 0."""
    tracker = BlockTracker(**options)
    for seq, each in enumerate(batches):
        tracker.apply(each, seq)
    return tracker


def held(tracker):
    """Return the resident hashes with their multiplicities, in all locations."""
    return {key: n for blocks in tracker.resident().values() for key, n in blocks.items()}


IN_TWO_TIERS = stored(1, medium="GPU"), stored(1, medium="CPU")
OTHER_TOKENS = stored(1, medium="GPU", size=2)

TRACKED = {
    "stored twice, removed once": (
        [stored(1), stored(1), removed(1)],
        {1: 1},
        {"stored": 1, "stored_again": 1, "removed": 0},
    ),
    "stored twice, removed twice": (
        [stored(1), stored(1), removed(1), removed(1)],
        {},
        {"stored": 1, "stored_again": 1, "removed": 1},
    ),
    "reused, by the origin of the event": (
        [stored(1), stored(1, more={"origin": "REUSED"})],
        {1: 1},
        {"stored": 1, "reused": 1},
    ),
    "removed from whatever tier has it": (
        [stored(1, medium="GPU"), removed(1)],
        {},
        {"never_stored": 0},
    ),
    "below an unknown parent": ([stored(2, parent=1)], {2: 1}, {"unknown_parent": 1}),
    "twice in an event": ([stored(1, 1)], {1: 2}, {"repeated": 1}),
    "with other tokens, while another tier has it": (
        [*IN_TWO_TIERS, removed(1, medium="GPU"), OTHER_TOKENS],
        {1: 1},
        {"collision": 1},
    ),
    "with other tokens, when no tier has it": (
        [*IN_TWO_TIERS, *(removed(1, medium=tier) for tier in ("GPU", "CPU")), OTHER_TOKENS],
        {1: 1},
        {"collision": 0},
    ),
    "with other tokens, after a clear": (
        [stored(1), AllBlocksCleared(), stored(1, size=2)],
        {1: 1},
        {"collision": 0},
    ),
}
"""By what is told of a block: events, what is resident after them, and what they count."""


@pytest.mark.parametrize(("events", "resident", "counts"), TRACKED.values(), ids=TRACKED)
def test_a_block_is_resident_and_counted_as_its_events_tell(events, resident, counts):
    """A hash is removed as often as it was stored; what contradicts that is an anomaly."""
    tracker = follow(batch(*events))
    assert held(tracker) == resident
    known = vars(tracker) | tracker.anomalies
    assert {name: known[name] for name in counts} == counts


def test_a_second_store_in_a_full_report_is_a_reuse():
    """In full-report mode a second store is a reuse, and one removal removes the block."""
    tracker = follow(batch(stored(1), stored(1, 2)), batch(removed(1)), full=True)
    assert held(tracker) == {2: 1}
    assert (tracker.stored, tracker.reused, tracker.stored_again) == (2, 1, 0)


def test_tiers_ranks_and_groups_are_tracked_separately():
    """A hash can be in several tiers, ranks and groups, and is removed from each by itself."""
    tracker = follow(
        EventBatch(0.0, (stored(1, medium="GPU"), stored(1, medium="CPU")), 0),
        EventBatch(0.0, (stored(1, medium="GPU", group=1),), 0),
        EventBatch(0.0, (removed(1, medium="GPU"),), 0),
    )
    assert tracker.resident() == {
        BlockLocation(0, 0, None, "CPU"): {1: 1},
        BlockLocation(0, 0, 1, "GPU"): {1: 1},
    }


def test_groups_and_ranks_without_blocks_take_no_memory():
    """Groups and ranks of which no block is resident are forgotten, as their blocks are."""
    batches = (
        EventBatch(
            0.0, (stored(group=rank), stored(1, group=rank), removed(1, group=rank)), rank
        )
        for rank in range(10)
    )
    tracker = follow(*batches)
    assert not any(tracker._groups.values())


CHANGES = st.lists(
    st.tuples(
        st.sampled_from([stored, removed, AllBlocksCleared, "restart"]),
        st.integers(0, 3),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from(["GPU", "CPU"]),
    )
)


@given(CHANGES)
def test_a_hash_is_held_as_long_as_a_location_has_it(changes):
    """`holds` is true of the resident hashes alone, after any events of ranks and groups."""
    tracker = BlockTracker()
    for change, value, group, rank, medium in changes:
        if change == "restart":
            tracker.restart(rank)
            continue
        where = {"medium": medium, "group": group}
        event = change() if change is AllBlocksCleared else change(value, **where)
        tracker.apply(EventBatch(0.0, (event,), rank))
        assert {value for value in range(4) if tracker.holds(value)} == held(tracker).keys()


def test_removals_of_absent_blocks_are_anomalies():
    """The removal of a block that is not resident is an anomaly with its place."""
    tracker = follow(batch(stored(1)), batch(stored(2), removed(9)))
    assert tracker.anomalies["never_stored"] == 1
    [found] = tracker.examples
    assert (found.where, found.what) == ("batch 1, event 1", "block 9")


def test_collisions_are_anomalies():
    """A resident hash with another parent or other tokens is a collision.

    After its removal the same hash is none. Tokens may be told by a later event than the first.
    """
    other = stored(1, size=2)
    tracker = follow(batch(stored(1, 2)), batch(stored(2)), batch(other))
    assert tracker.anomalies["collision"] == 2
    assert [example.what for example in tracker.examples] == [
        "block 2: parent None, before 1",
        "block 1: other tokens than before",
    ]
    fresh = follow(batch(stored(1), removed(1), other))
    assert fresh.anomalies["collision"] == 0
    untold = BlockStored(hashes=(1,))
    assert follow(batch(untold, stored(1), untold, stored(1))).anomalies["collision"] == 0
    assert follow(batch(untold, stored(1), untold, other)).anomalies["collision"] == 1


def test_a_clock_that_goes_back_is_no_restart():
    """A repeated number is a replay unless its time is later than all times before."""
    tracker = follow(batch(ts=1.0), batch(ts=9.0), batch(ts=3.0))
    tracker.apply(batch(ts=5.0), 0)
    assert (tracker.replayed, tracker.restarts) == (1, 0)


def test_unread_events_are_anomalies():
    """An event that could not be read is an anomaly with its reason."""
    tracker = follow(batch(UnparsedEvent(7, "events[0] must be a map")))
    assert tracker.anomalies["unread"] == 1
    assert tracker.examples[0].what == "events[0] must be a map"


def test_a_clear_drops_only_its_rank():
    """A clear drops the blocks of its rank and of no other."""
    tracker = BlockTracker()
    tracker.apply(EventBatch(0.0, (stored(1, 2),), 0))
    tracker.apply(EventBatch(0.0, (stored(3),), 1))
    tracker.apply(EventBatch(0.0, (AllBlocksCleared(),), 0))
    assert (held(tracker), tracker.cleared) == ({3: 1}, 2)


def test_replayed_batches_count_once():
    """A batch whose number and time were passed is ignored."""
    first, second = batch(stored(1), ts=1.0), batch(stored(2), ts=2.0)
    tracker = follow(first, second)
    assert not tracker.apply(first, 0)
    assert not tracker.apply(second, 1)
    assert (held(tracker), tracker.replayed, tracker.batches) == ({1: 1, 2: 1}, 2, 2)


def test_missing_numbers_are_a_gap():
    """Missing numbers of a publisher are a gap."""
    tracker = BlockTracker()
    for publisher, seq in (("a", 0), ("b", 7), ("a", 3), ("b", 8)):
        tracker.apply(batch(), seq, publisher)
    assert (tracker.gaps, tracker.missing) == ([("a", 1, 2)], 2)


def test_a_restart_drops_all_blocks():
    """A lower number with a later time is a restart, and drops all blocks before it."""
    tracker = follow(batch(stored(1), ts=1.0), batch(stored(2), ts=2.0))
    assert tracker.apply(batch(stored(3), ts=9.0), 0)
    assert (held(tracker), tracker.restarts, tracker.forgotten) == ({3: 1}, 1, 2)


def test_a_restart_may_begin_with_a_gap():
    """If the first batches after a restart are missing, they are a gap."""
    tracker = BlockTracker()
    for seq in range(5):
        tracker.apply(batch(ts=seq), seq)
    tracker.apply(batch(ts=9.0), 2)
    assert (tracker.restarts, tracker.gaps) == (1, [(None, 0, 2)])


def test_a_restart_that_is_told_may_begin_with_a_gap():
    """After a restart that the transport has told, missing first batches are a gap."""
    tracker = follow(batch(stored(1)))
    tracker.restart(None)
    tracker.apply(batch(stored(2)), 5)
    assert (tracker.restarts, tracker.gaps) == (1, [(None, 0, 5)])


def test_levels_move_blocks():
    """An update of the level moves a block to another tier; an unknown block is an anomaly."""
    page = Page(hash=5, tokens=((1, 0),), level=0, priority=35)
    tracker = follow(
        batch(PagesStored(pages=(page,))), batch(BlockUpdated(hash=5, level=(0, 1)))
    )
    assert tracker.resident() == {BlockLocation(None, None, None, "LEVEL_1"): {5: 1}}
    assert tracker.moved == 1
    tracker.apply(batch(BlockUpdated(hash=6, level=(0, 1))))
    assert tracker.anomalies["never_stored"] == 1


def test_an_update_that_keeps_the_level_moves_nothing():
    """A block whose update names its own tier, as one of the priority does, is there once."""
    page = Page(hash=5, tokens=((1, 0),), level=0, priority=35)
    update = BlockUpdated(hash=5, level=(0, 0))
    tracker = follow(batch(PagesStored(pages=(page,)), update))
    assert (held(tracker), tracker.moved) == ({5: 1}, 0)


def test_many_anomalies_keep_few_examples():
    """All anomalies are counted, and only the first twenty keep their places."""
    tracker = follow(*(batch(removed(9)) for _ in range(50)))
    assert (tracker.anomalies["never_stored"], len(tracker.examples)) == (50, 20)


class Counted(int):
    """A hash of a block that counts how often it is looked up."""

    looked_up = 0

    def __hash__(self):
        """Count the look-up."""
        Counted.looked_up += 1
        return int(self)


def test_a_removal_looks_among_the_blocks_of_its_own_group():
    """A removal takes the same time however many groups there are: a recording may have any."""
    tracker = follow(batch(*(stored(group, group=group) for group in range(500))))
    Counted.looked_up = 0
    tracker.apply(batch(removed(Counted(7), group=7), removed(Counted(7), group=8)), 1)
    assert (tracker.removed, tracker.anomalies["never_stored"]) == (1, 1)
    assert Counted.looked_up < 20


def test_whether_a_block_is_held_is_looked_up_once():
    """Whether a hash is resident takes the same time for any groups and ranks."""
    events = tuple(stored(group, group=group) for group in range(100))
    tracker = follow(*(EventBatch(0.0, events, rank) for rank in range(3)))
    Counted.looked_up = 0
    assert [tracker.holds(Counted(value)) for value in (5, 1_000)] == [True, False]
    assert Counted.looked_up == 2


def test_a_restart_looks_at_the_blocks_of_its_own_publisher():
    """A restart takes the same time however many publishers there are."""
    compared = []

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str(self) == str(other)

    tracker = BlockTracker()
    for number in range(500):
        tracker.apply(batch(stored(1)), 0, Name(number))
    compared.clear()
    tracker.restart(Name(7))
    assert (tracker.forgotten, len(held(tracker))) == (1, 1)
    assert len(compared) < 20


def test_blocks_are_in_few_tiers():
    """Blocks in more tiers than any engine has are events that cannot be read."""
    tiers = [stored(1, medium=f"tier {number}") for number in range(20)]
    tracker = follow(batch(*tiers, BlockUpdated(hash=1, level=(0, 1))))
    assert (len(tracker.resident()), tracker.anomalies["unread"]) == (16, 4)


def test_tiers_without_blocks_are_not_counted():
    """Tiers of which all blocks were removed or moved away leave room for others."""
    passing = [
        event
        for number in range(20)
        for event in (stored(2, medium=f"tier {number}"), removed(2, medium=f"tier {number}"))
    ]
    moves = [BlockUpdated(hash=1, level=(number, number + 1)) for number in range(20)]
    tracker = follow(batch(stored(1, medium="LEVEL_0"), *passing, *moves))
    assert tracker.anomalies["unread"] == 0
    assert tracker.resident() == {BlockLocation(None, None, None, "LEVEL_20"): {1: 1}}
