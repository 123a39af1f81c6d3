"""The server's page in a real browser, with the demo pair: the key prompt, overview, playground, and a lost rank."""

import json
import os
import re
import signal
import time
from typing import Any

import pytest

from tests.serving.api.apps import metric_sum
from tests.serving.page.browser import Page
from tests.serving.page.conftest import Server

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]

PROMPT = "class Queue:\n    def __init__(self"
RUN_HAS_ENDED = "!document.querySelector('#run').disabled"
NODE_TITLE = re.compile(r'("(?:[^"\\]|\\.)*"), token \d+: (root|accepted|bonus|not taken)(, forced by the grammar)?')


def run_playground(page: Page, prompt: str, max_tokens: int, **constraint: str) -> str:
    """Run the playground until its answer ends, and return the answer's text.

    `constraint` has at most one entry: the form of the constraint (such as `regex`) and its text.
    """
    start_run(page, prompt, max_tokens, **constraint)
    page.wait(RUN_HAS_ENDED, 120)
    assert page.text("#trouble") == ""
    return page.text("#answer")


def start_run(page: Page, prompt: str, max_tokens: int, **constraint: str) -> None:
    """Fill in the playground's form and click its run button."""
    page.click("#tab-playground")
    page.choose("#form", next(iter(constraint), ""))
    for text in constraint.values():
        page.fill("#constraint", text)
    page.fill("#max_tokens", str(max_tokens))
    page.fill("#prompt", prompt)
    page.click("#run")


def shown_tree_nodes(page: Page) -> list[tuple[str, str, bool]]:
    """(text, kind, whether the grammar forced it) of each node of the shown tree, in the order of the page."""
    matches = [NODE_TITLE.fullmatch(title) for title in page.texts("#tree g.node title")]
    assert all(matches)
    return [(json.loads(match[1]), match[2], bool(match[3])) for match in matches if match]


def test_page_asks_for_a_key_and_shows_the_overview_with_a_valid_key(tab: Page, server: Server) -> None:
    tab.set_viewport()
    tab.open(f"{server.url}/")
    tab.get("sessionStorage.clear()")
    tab.open("about:blank#left")
    tab.open(f"{server.url}/")
    tab.wait("!document.querySelector('#door').hidden")
    assert tab.get("document.querySelector('main').hidden") and "aerie-demo" not in tab.text("body")
    tab.fill("#key", "sk-aerie-wrong")
    tab.press("Enter")
    tab.wait("document.querySelector('#denied').textContent.includes('not valid')")
    assert "aerie-demo" not in tab.text("body")
    assert tab.errors and all("401" in error for error in tab.errors), "only the refused requests are errors"
    tab.fill("#key", server.use_key)
    tab.press("Enter")
    tab.wait("document.querySelector('#health').textContent === 'serving'")
    assert "aerie-demo" in tab.text("#served")
    tab.wait("document.querySelectorAll('#ranks tbody tr').length === 2")
    tab.open(f"{server.url}/#playground")
    tab.open(f"{server.url}/")
    tab.wait("document.querySelector('#health').textContent === 'serving'")
    tab.click("#forget")
    tab.wait("!document.querySelector('#door').hidden && document.querySelector('main').hidden")
    assert tab.get("sessionStorage.length") == 0


def test_playground_shows_the_draft_tree_of_each_streamed_step(page: Page, server: Server) -> None:
    """In each step, the accepted path and the bonus token make up the step's text. All steps make up the API's text."""
    answer_text = run_playground(page, PROMPT, 64)
    response = server.complete(prompt=PROMPT, max_tokens=64, temperature=0)
    assert answer_text == response["choices"][0]["text"] and "64 tokens in" in page.text("#tally")
    runs = page.texts(".run")
    assert "".join(runs) == answer_text and 10 < len(runs) < 40
    page.click(".run")
    assert "has no tree" in page.text("#shown-text")
    path_token_count, tree_sizes = 0, set()
    for number, run in enumerate(runs[1:], 2):
        page.press("ArrowRight")
        assert f"step {number} of {len(runs)}" in page.text("#shown-title")
        assert page.get("document.activeElement.textContent") == run
        nodes = shown_tree_nodes(page)
        path = [text for text, kind, _ in nodes if kind in ("accepted", "bonus")]
        assert nodes[0][1] == "root" and nodes[-1][1] != "root" and [kind for _, kind, _ in nodes].count("bonus") == 1
        # the page draws the nodes in depth-first order, and the accepted path first
        assert "".join(path).startswith(run) and (run == "".join(path) or number == len(runs))
        assert f"{len(path) - 1} accepted" in page.text("#shown-text")
        path_token_count += len(path)
        tree_sizes.add(len(nodes) - 2)
    assert path_token_count >= 63 and tree_sizes == {15}
    page.press("Home")
    assert page.get("document.activeElement.textContent") == runs[0]
    page.click("#after")
    assert f"step 2 of {len(runs)}" in page.text("#shown-title")
    page.click("#trees-too")
    assert run_playground(page, PROMPT, 64) == answer_text, "the text depends on whether the page asks for trees"
    assert page.get("document.querySelectorAll('.has-tree').length === 0 && document.querySelector('#shown').hidden")
    page.click("#trees-too")


def test_playground_marks_tokens_forced_by_the_grammar(page: Page) -> None:
    pattern = r"class [A-Z][a-z]{3,9}\(object\):\n    def __init__\(self, [a-z]{3,8}\):\n"
    answer_text = run_playground(page, "import os\n\n", 60, regex=pattern)
    assert re.fullmatch(pattern, answer_text)
    page.click(".run.forced")
    nodes = shown_tree_nodes(page)
    assert any(forced and kind == "accepted" for _, kind, forced in nodes)
    assert "forced by the grammar" in page.text("#shown-text")
    schema = {"type": "object", "properties": {"found": {"enum": ["yes", "no"]}}, "required": ["found"]}
    assert json.loads(run_playground(page, "x = ", 60, schema=json.dumps(schema)))["found"] in ("yes", "no")
    start_run(page, "x", 9, regex="(")
    page.wait("document.querySelector('#trouble').textContent")
    assert "regex" in page.text("#trouble") and page.get(RUN_HAS_ENDED)
    assert [error for error in page.errors if "400" not in error] == []
    page.errors.clear()


def test_stop_button_ends_the_answer(page: Page, server: Server) -> None:
    start_run(page, PROMPT, 4000)
    page.wait("document.querySelectorAll('.run').length > 3")
    page.click("#stop")
    page.wait("document.querySelector('#tally').textContent.startsWith('stopped after')")
    page.wait(RUN_HAS_ENDED)
    page.click("#tab-overview")
    page.wait("document.querySelectorAll('#figures dd')[2].textContent === '0'")
    # The overview may still show a number from before the run. The whole answer would take longer than this wait.
    deadline = time.monotonic() + 3.0
    while server.get("/server_state")["requests"]["streaming"]:
        assert time.monotonic() < deadline, "the server goes on with an answer that was stopped"
        time.sleep(0.05)


def test_playground_chat_keeps_its_messages_until_reset(page: Page) -> None:
    page.click("#tab-playground")
    page.choose("#kind", "chat")
    first_answer = run_playground(page, "import os", 12)
    run_playground(page, "and then", 12)
    messages = page.texts("#turns li")
    assert messages[:2] == ["userimport os", f"assistant{first_answer}"] and messages[2] == "userand then"
    page.click("#anew")
    assert page.texts("#turns li") == [] and page.text("#answer") == ""


def test_overview_shows_the_metrics_of_the_server(page: Page, server: Server) -> None:
    server.complete(prompt=PROMPT, max_tokens=40, temperature=0)
    metrics = server.metrics_page()
    drafts, accepted = (int(metric_sum(metrics, f"aerie_{name}_total")) for name in ("drafts", "accepted_draft_tokens"))
    page.wait(f"document.querySelector('#trees').textContent.includes('{drafts} trees')")
    assert f"{1 + accepted / drafts:.2f} tokens" in page.text("#trees")
    rows = page.get("[...document.querySelectorAll('#depths tbody tr')].map(r => [...r.cells].map(c => c.textContent))")
    for depth, percentage, *_ in rows:
        count = sum(
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("aerie_accepted_by_depth_total{") and f'depth="{depth}"' in line
        )
        assert (
            percentage == f"{100 * count / drafts:.0f} %" or abs(float(percentage[:-2]) - 100 * count / drafts) <= 0.5
        )
    assert len(rows) >= 4
    page.wait("document.querySelectorAll('#speed svg .line').length > 0")
    assert page.texts("#ranks tbody td:first-child") == ["0", "1"]
    assert "EAGLE3" in page.text("#loaded") and page.text("#fault-counts").startswith("None")


@pytest.mark.parametrize(("width", "dark"), [(320, False), (390, True), (1200, True)])
def test_page_fits_narrow_screens_and_dark_mode(page: Page, width: int, dark: bool) -> None:
    page.set_viewport(width, 800, dark)
    run_playground(page, PROMPT, 32)
    for view in ("playground", "overview"):
        page.click(f"#tab-{view}")
        page.wait(f"!document.querySelector('#{view}').hidden")
        assert page.get("document.documentElement.scrollWidth") <= width
    channels = [int(c) for c in re.findall(r"\d+", page.get("getComputedStyle(document.body).backgroundColor"))]
    assert (max(channels) < 80) == dark


def test_page_works_with_the_keyboard_alone(page: Page) -> None:
    page.get("document.querySelector('#tab-overview').focus()")
    page.press("ArrowRight")
    assert page.get("document.activeElement.id") == "tab-playground"
    assert page.get("!document.querySelector('#playground').hidden && document.querySelector('#overview').hidden")
    focused_ids = []
    for _ in range(12):
        page.press("Tab")
        focused_ids.append(page.get("document.activeElement.id"))
    assert focused_ids[:8] == ["kind", "temperature", "max_tokens", "seed", "form", "trees-too", "prompt", "run"]


def test_page_shows_when_the_server_does_not_answer(page: Page) -> None:
    page.call("Network.enable")
    offline: dict[str, Any] = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    page.call("Network.emulateNetworkConditions", offline=True, **offline)
    page.wait("document.querySelector('#health').textContent.startsWith('no answer')")
    page.call("Network.emulateNetworkConditions", offline=False, **offline)
    page.wait("document.querySelector('#health').textContent === 'serving'")
    assert all("ERR_INTERNET_DISCONNECTED" in error for error in page.errors)
    page.errors.clear()


def test_page_shows_a_killed_rank_and_the_stream_continues(page: Page, server: Server) -> None:
    """The page names the rank and shows when its gang serves again. The open answer gets its undisturbed text."""
    undisturbed_text = server.complete(prompt=PROMPT, max_tokens=1500, temperature=0)["choices"][0]["text"]
    [pid] = [rank["pid"] for rank in server.get("/server_info")["ranks"] if rank["rank"] == 1]
    start_run(page, PROMPT, 1500)
    page.wait("document.querySelectorAll('.run').length > 5")
    os.kill(pid, signal.SIGKILL)
    health_text = page.wait(
        "document.querySelector('#health').className === 'bad' && document.querySelector('#health').textContent"
    )
    assert health_text.startswith("not serving") and "rank 1 died" in health_text
    assert page.get("!document.querySelector('#run').disabled") is False, "the answer ended instead of waiting"
    page.wait("document.querySelector('#health').textContent === 'serving'", 120)
    page.wait(RUN_HAS_ENDED, 120)
    assert page.text("#trouble") == "" and page.text("#answer") == undisturbed_text
    page.click("#tab-overview")
    page.wait("document.querySelector('#fault-counts').textContent.startsWith('1 lost, 1 restarts, 1 streams resumed')")
    [fault] = page.texts("#faults li")
    assert "rank 1 died at step" in fault and "served again after" in fault
    assert page.texts("#ranks tbody td:first-child") == ["0", "1"]
    assert "silent" not in page.text("#ranks")
