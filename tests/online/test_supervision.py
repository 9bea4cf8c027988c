"""Messages and limits of servers: few messages, whatever happens how often."""

import pytest

from kvcore_online.supervision import _MOST_KINDS, Messages, connection_limit

resource = pytest.importorskip("resource", reason="needs limits of processes")


def test_each_kind_of_message_is_printed_at_its_first_tenth_and_hundredth_time(capsys):
    """Messages of two kinds do not hide each other; repeated ones say how often they came."""
    messages = Messages()
    for _ in range(100):
        messages.warn("it failed")
        messages.warn("it failed again", "another")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"kvcore: {sentence}{times}"
        for times in ("", " (10 times)", " (100 times)")
        for sentence in ("it failed", "it failed again")
    ]


def test_messages_of_ever_new_kinds_are_bounded(capsys):
    """Of kinds beyond the first ones, few messages are printed, and nothing is kept."""
    messages = Messages()
    for number in range(_MOST_KINDS + 1_000):
        messages.warn(f"error {number}")
    assert len(messages._counts) == _MOST_KINDS + 1
    assert len(capsys.readouterr().err.splitlines()) == _MOST_KINDS + 4


ANY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "files", "raised", "connections"),
    [
        ((1_024, 4_096), 10_000, 1, 4_096, 3_840),
        ((1_024, ANY), 2_000, 2, 4_256, 2_000),
        ((8_192, 8_192), 100, 1, None, 100),
        ((356, 356), 100, 1, None, 100),
        ((48, 48), 100, 1, 48, 24),
        ((ANY, ANY), 10**6, 2, None, 10**6),
    ],
)
def test_connections_stay_below_the_limit_of_open_files(
    monkeypatch, limits, wanted, files, raised, connections
):
    """The limit is raised as far as is needed and allowed; some files stay free."""
    set_limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: set_limits.append(new))
    assert connection_limit(wanted, files) == connections
    assert set_limits == ([] if raised is None else [(raised, limits[1])])


def test_a_limit_of_open_files_that_cannot_be_raised_holds(monkeypatch):
    """If the system refuses to raise the limit, connections stay below the one there is."""

    def refused(_, new):
        raise OSError(new)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1_024, 4_096))
    monkeypatch.setattr(resource, "setrlimit", refused)
    assert connection_limit(10_000) == 768
