"""Tests of `kvcore tour`: its page shows what the engine did, with sizes as `kvcore size`."""

import json
from math import exp

import pytest
from helpers.browser import NARROW, WIDE, tab
from helpers.pages import data_of

from kvcore.plugins.manager import Plugins
from kvcore_cli.main import run
from kvcore_replay.check.trace import check_trace

if Plugins().get("generator", "transformer").unavailable() is not None:
    pytest.skip("needs torch", allow_module_level=True)
pytest.importorskip("plotly")

PARTS = ("caching", "memory", "sharing", "eviction", "window", "attention")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Return the path of the page that the command writes."""
    path = tmp_path_factory.mktemp("tour") / "tour.html"
    assert run(["tour", "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def data(page):
    """Return the data in the page, by part."""
    return data_of(page.read_bytes(), "tour")


def printed(capsys, *arguments):
    """Run a verb with `--json`, require success, and return the document."""
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def events(lines, name):
    """Return the events of a given name in the text of a trace."""
    return [each for each in map(json.loads, lines.splitlines()) if each["event"] == name]


def checked(tmp_path, lines):
    """Return the report of `check_trace` on the text of a trace."""
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    return check_trace(path)


# The command `kvcore tour`.


def test_the_page_is_small_and_the_same_each_time(page, tmp_path, capsys):
    """The page has the same bytes each time, less than 3 MB, and its path is printed."""
    again = tmp_path / "again.html"
    assert run(["tour", "-o", str(again)]) == 0
    assert capsys.readouterr().out.startswith(f"{again}: ")
    assert again.read_bytes() == page.read_bytes()
    assert len(page.read_bytes()) < 3_000_000


def test_without_torch_no_page_is_written(tmp_path, capsys, monkeypatch):
    """Without torch `tour` exits with code 3 and what to install, and writes no file."""
    transformer = Plugins().get("generator", "transformer")
    monkeypatch.setattr(transformer, "unavailable", lambda: "needs torch: install it")
    assert run(["tour", "-o", str(tmp_path / "tour.html")]) == 3
    assert "cannot work here: needs torch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# The data of the page, compared with the engine.


def test_the_counts_of_caching_are_those_of_the_demo(data, capsys):
    """In parts 1 and 2, projections and bytes of each step are those of `demo cache`."""
    part = data["caching"]
    sizes = {"--prompt-tokens": part["prompt"], "--output": part["output"]}
    options = [str(word) for pair in sizes.items() for word in pair]
    demo = printed(capsys, "demo", "cache", *options, "--block-size", str(part["block_size"]))
    for shown, counted in zip(part["caches"], demo["caches"], strict=True):
        assert shown["cache"] == counted["cache"]
        assert shown["projections"] == counted["step_projections"]
        assert sum(shown["projections"]) == counted["token_projections"]
        assert shown["kv_bytes"] == counted["step_kv_bytes"]


def test_traces_pass_the_check(data, tmp_path):
    """In parts 3 to 5, every trace passes `check_trace` and is complete."""
    traces = [data["sharing"]["lines"]]
    traces += [run_["lines"] for case in data["eviction"]["cases"] for run_ in case["runs"]]
    for variant in data["window"]["variants"]:
        traces += [variant["lines"], variant["cache_lines"]]
    assert len(traces) == 13
    assert all(checked(tmp_path, lines).complete for lines in traces)


def test_sharing_has_a_frame_for_each_line_and_a_copy(data):
    """In part 3, each line of the trace is a frame, and a copy leaves full blocks shared."""
    part = data["sharing"]
    assert [frame["line"] for frame in part["frames"]] == part["lines"].splitlines()[1:-1]
    (copy,) = events(part["lines"], "COPY")
    frame = part["frames"][copy["n"] - 1]
    tables = {table["name"]: table["blocks"] for table in frame["tables"]}
    assert tables["A"][:2] == tables["A2"][:2] == tables["B"][:2]
    assert (tables["A"][2], tables["A2"][2]) == (copy["from"], copy["to"])
    assert frame["pool"][copy["to"]]["words"] == ["Name", "a", "fruit", "Pear"]


@pytest.mark.parametrize(("case", "blocks"), [(0, [18, 15]), (1, [9, 17])])
def test_lfu_wins_the_first_case_and_lru_the_second(data, case, blocks):
    """In part 4, LFU computes fewer blocks in the first case, and LRU in the second."""
    runs = data["eviction"]["cases"][case]["runs"]
    computed = [sum(3 - frame["hit"] for frame in each["frames"]) for each in runs]
    assert [each["policy"] for each in runs] == ["lru", "lfu"]
    assert computed == blocks


def test_evictions_and_their_price_are_those_of_the_trace(data):
    """In part 4, evicted blocks are those of EVICT lines, and their price is a later miss."""
    prices = 0
    for case in data["eviction"]["cases"]:
        for each in case["runs"]:
            out = [gone for frame in each["frames"] for gone in frame["evicted"]]
            lines = events(each["lines"], "EVICT")
            assert len(out) == sum(abs(count) for line in lines for _, count in line["runs"])
            for gone in out:
                if gone["missed"] is not None:
                    prices += 1
                    frame = each["frames"][gone["missed"] - 1]
                    assert case["requests"][gone["missed"] - 1] == gone["block"][0]
                    assert frame["hit"] < int(gone["block"][1])
    assert prices


def test_the_engine_drops_the_blocks_of_the_frames(data):
    """In part 5, the run on tensors and the cache alone drop the same blocks."""

    def drops(lines):
        return [(event["first"], event["blocks"]) for event in events(lines, "EVICT")]

    everything, *forgetting = data["window"]["variants"]
    assert drops(everything["lines"]) == []
    for variant in forgetting:
        reported = drops(variant["lines"])
        assert reported == drops(variant["cache_lines"]) != []
        gone = {p for first, count in reported for p in range(first, first + count)}
        holes = variant["frames"][-1]["gone"]
        assert gone == {index for first, end in holes for index in range(first, end)}


def test_the_code_word_is_answered_only_while_cached(data):
    """In part 5, the model answers the code word if and only if its block is held.

    Each row of attention sums to 1.
    """
    words = data["window"]["words"]
    at = words.index("tulip") // data["window"]["block_size"]
    answers = set()
    for variant in data["window"]["variants"]:
        asked = next(f for f in variant["frames"] if f["computed"] == len(words))
        held = not any(first <= at < end for first, end in asked["gone"])
        answers.add(held)
        assert (variant["answer"][0] == "tulip") == held
        assert all(sum(row) == pytest.approx(1, abs=0.01) for row in variant["attention"])
    assert answers == {True, False}


def test_the_head_is_softmax_of_the_engine(data):
    """In part 6, the weights are the softmax of q and K, and give the engine's output."""
    part = data["attention"]
    scores = [
        sum(q * k for q, k in zip(part["query"], key, strict=True)) / part["width"] ** 0.5
        for key in part["keys"]
    ]
    total = sum(map(exp, scores))
    assert part["weights"] == pytest.approx([exp(score) / total for score in scores])
    columns = zip(*part["values"], strict=True)
    output = [sum(w * v for w, v in zip(part["weights"], c, strict=True)) for c in columns]
    assert part["output"] == pytest.approx(output)
    assert part["engine_output"] == pytest.approx(output)
    assert len(part["keys"]) == len(part["words"]) + 1


# The page in a browser.


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_errors_or_requests(browser, page, scheme):
    """The page opens without errors or requests, and fits wide and narrow windows."""
    with tab(browser, WIDE, scheme=scheme) as opened:
        shown = opened.open(page)
        for width, height in (WIDE, NARROW):
            shown.set_viewport_size({"width": width, "height": height})
            for key in ("Home", "End"):
                for part in PARTS:
                    shown.locator(f"#player-{part}").press(key)
                # The chart is drawn when it is scrolled into view.
                shown.locator("#growth-chart").scroll_into_view_if_needed()
                shown.wait_for_selector("#growth-chart .main-svg")
                assert shown.evaluate("document.documentElement.scrollWidth") <= width
        assert (opened.complaints, opened.requests) == ([], [])


def test_on_a_phone_the_text_leaves_room_for_the_picture(browser, page):
    """On a phone sentence and buttons take a fifth of the window; the rest of a text opens."""
    with tab(browser, NARROW) as opened:
        shown = opened.open(page)
        for part in PARTS:
            player = shown.locator(f"#player-{part}")
            for key in ("Home", "ArrowRight", "End"):
                player.press(key)
                assert player.locator(".dock").bounding_box()["height"] <= NARROW[1] / 5, part
        text, more = player.locator(".say"), player.locator(".more")
        assert more.get_attribute("aria-expanded") == "false"
        more.click()
        assert more.get_attribute("aria-expanded") == "true"
        assert text.evaluate("each => each.scrollHeight <= each.clientHeight")
    with tab(browser, WIDE) as opened:
        assert not opened.open(page).locator(".more").first.is_visible()


def test_keys_step_through_all_parts(browser, page, data):
    """Arrow keys, Home and End go through the steps of each part.

    The number of steps follows from the data of the part.
    """
    counts = {
        "caching": data["caching"]["output"],
        "memory": data["caching"]["output"],
        "sharing": len(data["sharing"]["frames"]),
        "eviction": len(data["eviction"]["cases"][0]["requests"]),
        "window": len(data["window"]["variants"][0]["frames"]),
        "attention": 7,
    }
    with tab(browser, WIDE) as opened:
        shown = opened.open(page)
        for part, count in counts.items():
            player = shown.locator(f"#player-{part}")
            steps = []
            for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"):
                player.press(key)
                steps.append(int(player.get_attribute("data-step")))
            assert steps == [1, 2, 1, count - 1, 0], part
            sentence = player.locator(".say")
            assert sentence.get_attribute("aria-live") == "polite"
            assert sentence.inner_text()


def test_space_plays_and_pauses_and_nothing_plays_by_itself(browser, page):
    """Space plays a part, which stops at its end; no part plays by itself."""
    with tab(browser, WIDE) as opened:
        shown = opened.open(page)
        player = shown.locator("#player-attention")
        button = player.locator(".play")
        assert [each.inner_text() for each in shown.locator(".play").all()] == ["Play"] * 6
        player.locator("select").select_option(label="fast")
        player.press("End")
        player.press("ArrowLeft")
        player.press(" ")
        assert button.inner_text() == "Pause"
        assert player.locator(".say").get_attribute("aria-live") == "off"
        shown.wait_for_selector("#player-attention[data-step='6']")
        assert button.inner_text() == "Play"


def test_cells_are_the_counts_of_each_step(browser, page, data):
    """In part 1, the computed, reused and wasted cells are as many as the data has."""
    none, _, paged = data["caching"]["caches"]
    with tab(browser, NARROW) as opened:
        shown = opened.open(page)
        shown.locator("#player-caching").press("End")
        tables = shown.locator("#player-caching table.grid").all()
        counts = [
            [table.locator(f"td.{kind}").count() for kind in ("computed", "reused", "vain")]
            for table in tables
        ]
    prompt, steps = data["caching"]["prompt"], data["caching"]["output"]
    total = sum(prompt + step for step in range(steps))
    new = sum(paged["projections"])
    assert counts == [[new, 0, sum(none["projections"]) - new], [new, total - new, 0]]


SIZED = [
    ("llama-3.1-8b", "fp16", "h100", 8192, 8),
    ("llama-2-70b-mha", "int4", "b200", 4099, 3),
    ("deepseek-v3", "fp8-e4m3", "h200", 100_001, 2),
    ("gemma-3-27b", "kivi:bits=2", "a100-80g", 32_768, 64),
    ("mistral-7b-v0.1", "int8", "rtx-4090", 131_072, 500),
    ("gpt-oss-120b", "fp16", "h100", 1, 1),
]


def test_the_calculator_is_kvcore_size(browser, page, capsys):
    """The calculator has the bytes, the budget and the number of requests of `kvcore size`."""
    with tab(browser, WIDE) as opened:
        shown = opened.open(page)
        for model, codec, device, tokens, batch in SIZED:
            shown.locator("#calc-model").select_option(model)
            shown.locator("#calc-codec").select_option(codec)
            shown.locator("#calc-device").select_option(device)
            shown.locator("#calc-tokens").fill(str(tokens))
            shown.locator("#calc-batch").fill(str(batch))
            found = shown.evaluate(
                "Object.fromEntries([...document.querySelectorAll('.amounts td')]"
                ".map((each) => [each.id, Number(each.dataset.value)]))"
            )
            options = ["--codec", codec, "--device", device]
            options += ["--tokens", str(tokens), "--batch", str(batch)]
            reported = printed(capsys, "size", model, *options)
            assert found == {
                "calc-token": reported["kv"]["bytes_per_token"],
                "calc-request": reported["kv"]["bytes_per_request"],
                "calc-wanted": reported["kv"]["bytes_per_batch"],
                "calc-weights": reported["model"]["weight_bytes"],
                "calc-budget": reported["fit"]["kv_budget_bytes"],
                "calc-requests": reported["fit"]["requests"],
            }, model
            verdict = shown.locator("#calc-verdict").inner_text()
            assert verdict.startswith("It fits") == reported["fit"]["batch_fits"]


@pytest.mark.slow
def test_cells_of_a_column_show_their_arithmetic(browser, page, data):
    """In part 6, the cells of a column can be focused and show their arithmetic."""
    with tab(browser, WIDE) as opened:
        shown = opened.open(page)
        player = shown.locator("#player-attention")
        for _ in range(4):
            player.press("ArrowRight")
        cells = player.locator("td[data-why][tabindex='0']")
        assert cells.count() == len(data["attention"]["keys"])
        cells.first.focus()
        weight = f"{data['attention']['weights'][0]:.3f}"
        assert weight in player.locator(".why").inner_text()
