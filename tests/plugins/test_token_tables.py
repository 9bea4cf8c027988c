"""Tables of a gateway's tokens: what their prompts are assumed to share, and what is told."""

from pathlib import Path

import pytest

from kvcore.errors import InputError
from kvcore.workloads import checked
from kvcore_plugins.workload import Chat, Lengths
from kvcore_plugins.workload.usage import UNKNOWN_PROMPTS

CHATS = Path(__file__).parents[2] / "examples" / "chats.jsonl"
HEADER = "time_s,prompt_tokens,completion_tokens,cached_tokens,session,user"


def table(tmp_path, *rows, header=HEADER, **options):
    """Return the workload of a table."""
    path = tmp_path / "gw.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return Lengths(path, **options)


def hits(requests):
    """Return the keys of each prompt that an endless cache has before it."""
    seen, found = set(), []
    for request in requests:
        found.append(sum(key in seen for key in request.keys))
        seen.update(request.keys, request.output_keys)
    return found


SESSION = ("0,160,32,0,s,u", "1,256,64,0,s,u", "2,272,16,0,s,u", "3,64,16,0,s,u")


def test_a_table_of_lengths_says_that_nothing_hits(tmp_path):
    """Without prompts nothing hits, and the note says what can be assumed, and how."""
    workload = table(tmp_path, *SESSION)
    assert hits(workload) == [0] * 4
    (note,) = workload.notes
    assert note.startswith(f"{UNKNOWN_PROMPTS}; assume=session+cached lets a prompt begin with")


def test_a_prompt_may_begin_with_the_one_before_in_its_session(tmp_path):
    """It has the prompt and the answer before, the prompt if no more fits, or else nothing."""
    workload = table(tmp_path, *SESSION, assume="session")
    requests = list(checked(workload))
    assert hits(requests) == [0, 12, 16, 0]
    assert [request.after for request in requests] == [None, 0, 1, 2]
    assert "(2 do, 1 are shorter than the one before)" in workload.notes[0]


def test_a_prompt_may_begin_with_as_many_tokens_as_were_cached(tmp_path):
    """Cached tokens are those of the prompt before in the session, or of other sessions."""
    rows = ("0,160,32,0,a,u", "1,160,32,96,b,v", "2,256,16,128,a,u", "3,160,16,96,c,w")
    requests = list(checked(table(tmp_path, *rows, assume="cached")))
    assert hits(requests) == [0, 6, 8, 6]


def test_the_longer_of_both_assumptions_counts(tmp_path):
    """A session goes on with all that it said, and begins with what was cached."""
    rows = ("0,160,32,0,a,u", "1,160,32,96,b,v", "2,256,16,128,a,u")
    requests = list(checked(table(tmp_path, *rows, assume="session+cached")))
    assert hits(requests) == [0, 6, 12]


def test_cached_tokens_need_no_session(tmp_path):
    """Rows without sessions share what was cached with earlier rows, and wait for none."""
    header = HEADER.removesuffix(",session,user")
    rows = ("0,160,32,0", "1,160,32,96", "2,640,16,160", "3,640,16,512")
    requests = list(checked(table(tmp_path, *rows, header=header, assume="cached")))
    assert hits(requests) == [0, 6, 10, 32]
    assert {request.after for request in requests} == {None}


@pytest.mark.parametrize("rate", [0.05, 2])
def test_an_assumed_table_hits_as_its_texts_do(tmp_path, rate):
    """A table of chats that has the tokens an endless cache hit hits as much as the texts."""
    texts = list(Chat(CHATS, rate=rate, think=20))
    rows = [
        f"{request.arrival / 10**9},{request.prompt_tokens},{request.output_tokens},"
        f"{16 * cached},{request.session},"
        for request, cached in zip(texts, hits(texts), strict=True)
    ]
    requests = list(checked(table(tmp_path, *rows, assume="cached")))
    assert hits(requests) == hits(texts)


def test_the_share_that_was_cached_is_told(tmp_path):
    """A column of cached tokens is the check of a replay, as it is in a log of chats."""
    workload = table(tmp_path, "0,100,8,0,a,u", "1,100,8,50,b,u", "2,100,8,,b,u")
    assert len([*workload]) == 3
    assert workload.reported_hit_ratio == 0.25
    assert "the log reports 25.0% of its prompt tokens as cached" in workload.notes


@pytest.mark.parametrize(
    ("more", "assume", "complaint"),
    [
        ("", "session", "assume=session needs a column of session: session=COLUMN"),
        (",session", "cached", "assume=cached needs a column of cached: cached=COLUMN"),
        (",session,prefix_len", "session", "'prefix_len' tells what prompts share"),
    ],
)
def test_what_cannot_be_assumed_is_refused(tmp_path, more, assume, complaint):
    """An assumption needs its column, and a table that tells what prompts share has none."""
    header = f"time_s,input,output{more}"
    with pytest.raises(InputError, match=complaint):
        list(table(tmp_path, "0,5,3" + more.count(",") * ",1", header=header, assume=assume))


MODELS = ("0,100,8,big", "1,100,8,small", "2,100,8,big")


def test_a_table_of_several_models_says_so(tmp_path):
    """A note counts the rows of each model, and the file names that of most."""
    workload = table(tmp_path, *MODELS, header="time_s,isl,osl,Model Name")
    assert len([*workload]) == 3
    assert any(
        note.startswith("rows are of 2 models: big (2), small (1)") for note in workload.notes
    )
    assert workload.served_model == "big"


def test_rows_of_one_model_can_be_read(tmp_path):
    """With `only_model` the rows of another model are not read, and the note says so."""
    workload = table(tmp_path, *MODELS, header="time_s,isl,osl,model", only_model="small")
    assert [request.id for request in workload] == [1]
    assert "those of small alone are read" in workload.notes[-1]
    assert workload.served_model == "small"


def test_a_model_that_no_row_names_is_refused(tmp_path):
    """A model that is not there is an error that lists those that are."""
    workload = table(tmp_path, *MODELS, header="time_s,isl,osl,engine", model="engine")
    workload.only_model = "huge"
    with pytest.raises(InputError, match=r"of the model 'huge'; there are: big \(2\), small"):
        list(workload)


@pytest.mark.parametrize("assume", [None, "session"])
def test_names_are_numbers_unless_they_are_asked_for(tmp_path, assume):
    """Sessions and tenants that are found stay equal; a named column keeps its names."""
    rows = ("0,9,8,0,s-1,ann@x.org", "1,99,8,0,s-2,bob@x.org", "2,99,8,0,s-1,ann@x.org")
    requests = [*table(tmp_path, *rows, assume=assume)]
    assert [(request.session, request.tenant) for request in requests] == [
        ("1", "1"),
        ("2", "2"),
        ("1", "1"),
    ]
    asked = [*table(tmp_path, *rows, assume=assume, tenant="user", session="session")]
    assert (asked[1].session, asked[1].tenant) == ("s-2", "bob@x.org")


FAILED = ("0,100,8,200", "1,100,30,499", "2,100,0,500", "3,100,,429")


def test_failed_requests_that_generated_tokens_are_counted(tmp_path):
    """Requests that failed after they had used a GPU are told apart, with the option."""
    workload = table(tmp_path, *FAILED, header="time_s,isl,osl,status")
    assert [request.id for request in workload] == [0]
    (note, _) = workload.notes
    assert note.startswith(
        "failed requests left out: 3 (1 of which generated 30 tokens: failed="
    )


def test_failed_requests_that_generated_tokens_can_be_read(tmp_path):
    """With `failed` they are requests of the tokens that they generated; others stay out."""
    workload = table(tmp_path, *FAILED, header="time_s,isl,osl,status", failed=True)
    assert [(request.id, request.output_tokens) for request in workload] == [(0, 8), (1, 30)]
    told = [
        "failed requests that generated tokens, and are read: 1",
        "failed requests left out: 2",
    ]
    assert workload.notes[:2] == told
