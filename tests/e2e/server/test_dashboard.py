"""The dashboard and the chat page in a real browser, and what they tell to whom."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from .browser import Tab, chromium
from .conftest import Served, served

pytestmark = pytest.mark.bundled
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
METRICS_KEY = "only-for-metrics"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shown() -> Iterator[Served]:
    """A server without keys, on the bundled model."""
    with served() as server:
        yield server
        assert server.stop() == 0
        assert [line for line in server.lines if line["level"] == "error"] == []


@pytest.fixture(scope="module")
def locked(tiny: str) -> Iterator[Served]:
    """A server with two keys, and one for the metrics."""
    options = ("--api-key", "key-of-ada", "--api-key", "key-of-bob", "--metrics-key", METRICS_KEY)
    with served(*options, model=tiny) as server:
        yield server
        assert server.stop() == 0
        assert [line for line in server.lines if line["level"] == "error"] == []


@pytest.fixture
def tab(browser: Browser, shown: Served) -> Iterator[Tab]:
    """A page of the server without keys, whose cache is empty; in the end nothing was wrong on it."""
    with shown.http() as http:
        assert http.delete("/dashboard/cache").status_code == 200
    tab = Tab(browser, shown.url, color_scheme="light")
    yield tab
    tab.check()
    tab.context.close()


def state(server: Served, key: str = "") -> dict[str, Any]:
    """What the server says of its one model."""
    with server.http(headers={"Authorization": f"Bearer {key}"} if key else {}) as http:
        reply = http.get("/dashboard/state")
    assert reply.status_code == 200
    (model,) = reply.json()["models"].values()
    return {**model, "who": reply.json()["who"]}


def say(page: Page, text: str) -> None:
    """Asks on the chat page and waits for the answer."""
    number = page.locator(".turn").count() + 1
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".turn .report")).to_have_count(number)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def ask(server: Served, questions: list[str], key: str = "none", **options: Any) -> list[Any]:
    """A chat through the API."""
    messages: list[Any] = []
    replies = []
    with server.openai(api_key=key) as client:
        model = client.models.list().data[0].id
        for question in questions:
            messages.append({"role": "user", "content": question})
            reply = client.chat.completions.create(
                model=model, messages=messages, temperature=0, **{"max_tokens": 24, **options}
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            replies.append(reply)
    return replies


def legend(page: Page, name: str) -> str:
    return page.locator("#memory-legend li", has_text=name).locator("b").inner_text()


def test_chats_of_the_page_and_of_the_api_appear_on_the_dashboard(tab: Tab, shown: Served) -> None:
    board = tab.open("/")
    expect(board.locator("#status")).to_have_text("Live")
    expect(board.locator("#map .cell")).to_have_count(0)
    chat = tab.context.new_page()
    chat.goto("/chat")
    expect(chat.locator("#status")).to_have_text("Live")
    say(chat, "What is the capital of France?")
    say(chat, "And of Italy?")
    assert chat.locator(".answer .text").all_inner_texts() == [
        "The capital of France is Paris.",
        "The capital of Italy is Rome.",
    ]
    first, second = chat.locator(".report").all_inner_texts()
    assert "0 of 37 prompt tokens reused, 37 computed" in first
    assert "44 of 59 prompt tokens reused, 15 computed" in second
    assert re.search(r"first token [\d.]+ m?s", second)
    assert re.search(r"adds [\d.]+ KiB to the cache, less than 0.1 % of its budget", second)
    expect(chat.locator("#share-text")).to_have_text(re.compile(r"of the cache, in 4 blocks"))
    replies = ask(shown, ["Name three rivers of Europe, please.", "Which of them is the longest?"])

    seen = state(shown)
    names = list(seen["conversations"])
    assert len(names) == 2
    for name in names:
        row = board.locator(f"#{name}")
        expect(row).to_contain_text(f"2 turns · {seen['conversations'][name]['num_blocks']} blocks")
    by_api = board.locator(f"#{names[0]}")
    by_api.locator("summary").click()
    reused = by_api.locator("tbody tr:not(:has(.why)) td:nth-child(3)").all_inner_texts()
    assert reused == [str(reply.usage.prompt_tokens_details.cached_tokens) for reply in reversed(replies)]
    assert int(reused[0]) > 40
    cells = board.locator("#map .cell:not(.free)")
    expect(cells).to_have_count(len(seen["cells"]["rows"]))
    kept = seen["memory"]["kv_reusable_bytes"] / 1024**2
    assert legend(board, "KV reusable") == f"{kept:.1f} MiB"
    assert legend(board, "weights").endswith("MiB")
    expect(board.locator("#events li", has_text="was answered")).to_have_count(4)
    tab.check()

    board.get_by_role("button", name="Clear", exact=True).click()
    board.get_by_role("dialog").get_by_role("button", name="Clear").click()
    expect(cells).to_have_count(0)
    expect(board.locator("#map-empty")).to_be_visible()
    expect(board.locator(".conversation")).to_have_count(0)
    assert legend(board, "KV reusable") == "0 B"
    assert state(shown)["memory"]["kv_allocated_bytes"] == 0
    expect(chat.locator("#share-text")).to_have_text("Nothing of this chat is in memory.")


def test_a_conversation_is_pinned_and_dropped_from_the_dashboard(tab: Tab, shown: Served) -> None:
    board = tab.open("/")
    ask(shown, ["Write a sentence about whales."])
    ask(shown, ["Write a sentence about the moon."])
    kept, gone = state(shown)["conversations"]
    board.get_by_role("button", name=f"Pin {kept}").click()
    expect(board.locator("#map .cell.pinned")).not_to_have_count(0)
    board.get_by_role("button", name=f"Unpin {kept}").click()
    expect(board.locator("#map .cell.pinned")).to_have_count(0)
    board.get_by_role("button", name=f"Drop {gone}").click()
    board.get_by_role("dialog").get_by_role("button", name="Drop").click()
    expect(board.locator(".conversation")).to_have_count(1)
    assert list(state(shown)["conversations"]) == [kept]


def test_the_map_tells_of_each_block_by_pointer_and_by_keys(tab: Tab, shown: Served) -> None:
    ask(shown, ["Write a long story about a lighthouse and its keeper."], max_tokens=60)
    board = tab.open("/")
    cells = board.locator("#map .cell:not(.free)")
    expect(cells.first).to_be_visible()
    tip = board.locator("#tip")
    cells.first.hover()
    (name,) = state(shown)["conversations"]
    for text in ("Block 0: reusable", f"of {name}", "tokens 0 to 31", "sealed in int8", "used "):
        expect(tip).to_contain_text(text)
    board.mouse.move(0, 0)
    expect(tip).to_be_hidden()
    board.locator("#map").focus()
    board.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("tokens 32 to 63")
    board.keyboard.press("End")
    expect(tip).to_contain_text(re.compile(r"open, raw in (bf16|fp32)"))
    label = board.locator("#map [aria-selected=true]").get_attribute("aria-label")
    assert label is not None
    assert "Open block" in label
    board.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_a_turn_tells_why_not_more_was_reused(tab: Tab, shown: Served) -> None:
    for hour in ("nine", "eight"):
        ask(shown, [f"The office opens at {hour} in the morning and closes at five. When does it open?"])
    name = next(iter(state(shown)["conversations"]))
    board = tab.open(f"/#{name}")  # as the chat page links to it
    why = board.locator(f"#{name} td.why")
    expect(why).to_be_visible()
    expect(why).to_contain_text("differs from the most similar earlier one at position")
    expect(why.locator("mark").first).to_contain_text("nine")
    expect(why.locator("mark").last).to_contain_text("eight")


def test_a_chat_is_forked_rewound_edited_and_cleared(tab: Tab, shown: Served) -> None:
    page = tab.open("/chat")
    expect(page.locator("#status")).to_have_text("Live")
    for question in ("What is the capital of France?", "And of Italy?", "And of Spain?"):
        say(page, question)
    page.get_by_label("Fork the chat after answer 2").click()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator("#branch-list li")).to_have_count(2)
    say(page, "And of Portugal?")
    assert "Lisbon" in page.locator(".answer .text").last.inner_text()
    assert re.match(r"(6\d|7\d) of 81 prompt tokens reused", page.locator(".report p").all_inner_texts()[-3])
    page.get_by_label("Drop everything after answer 1").click()
    expect(page.locator(".turn")).to_have_count(1)
    page.locator("#branch-list button").first.click()
    expect(page.locator(".turn")).to_have_count(3)
    page.get_by_label("Edit question 2").click()
    page.get_by_role("textbox", name="Question 2").fill("And of Poland?")
    page.keyboard.press("Enter")
    expect(page.locator(".turn .report")).to_have_count(2)
    assert "Poland" in page.locator(".answer .text").last.inner_text()
    page.get_by_label("Ask question 2 again").click()
    expect(page.locator(".turn .report").last).to_contain_text("1 computed")
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator("#status")).to_have_text("Live")
    for _ in range(2):
        page.get_by_role("button", name="Clear", exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name="Clear").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator(".turn")).to_have_count(0)
    assert state(shown)["cells"]["rows"] == []


STOP_SOON = """() => new MutationObserver((_, observer) => {
  const stop = [...document.querySelectorAll("button")].find((button) => button.textContent.trim() === "Stop");
  if (!document.querySelector(".answer .text")?.textContent || !stop) return;
  observer.disconnect();
  stop.click();
}).observe(document.body, { childList: true, characterData: true, subtree: true })"""
"""Clicks as soon as there is text: between two calls from here the answer may have ended by itself."""


def test_an_answer_can_be_stopped(tab: Tab, shown: Served) -> None:
    page = tab.open("/chat")
    expect(page.locator("#status")).to_have_text("Live")
    page.evaluate(STOP_SOON)
    page.get_by_label("Message").fill("Write down all numbers from one to a thousand, in words.")
    page.keyboard.press("Enter")
    expect(page.locator(".notice")).to_have_text("You stopped this answer.")
    board = tab.context.new_page()
    board.goto("/")
    expect(board.locator("#figures div", has_text="Answering").locator("dd > span")).to_have_text("0")
    assert state(shown)["counts"]["running"] == 0


@pytest.mark.parametrize("path", ["/", "/chat"])
def test_pages_are_fit_for_dark_and_for_phones(browser: Browser, shown: Served, path: str) -> None:
    ask(shown, ["Write a sentence about bread."])
    for options in (
        {"color_scheme": "dark"},
        PHONE,
        {**PHONE, "color_scheme": "dark", "reduced_motion": "reduce"},
    ):
        tab = Tab(browser, shown.url, **options)
        page = tab.open(path)
        expect(page.locator("#status")).to_have_text("Live")
        if path == "/chat":
            say(page, "What is the capital of France?")
            page.locator("#settings summary").click()
        else:
            page.locator(".conversation summary").first.click()
        tab.check()
        tab.context.close()


def test_pages_load_nothing_from_elsewhere(browser: Browser, shown: Served) -> None:
    for path in ("/", "/chat"):
        tab = Tab(browser, shown.url)
        asked: list[str] = []
        tab.page.on("request", lambda request, asked=asked: asked.append(request.url))
        expect(tab.open(path).locator("#status")).to_have_text("Live")
        assert len(asked) > 3
        assert all(url.startswith(shown.url) for url in asked)
        tab.context.close()


def test_a_model_that_is_unloaded_leaves_the_page_and_comes_back(browser: Browser, tiny: str) -> None:
    with served("--keep-alive", "3", model=tiny) as server:
        tab = Tab(browser, server.url)
        board = tab.open("/")
        expect(board.locator("#model-name")).to_have_text("tiny")
        chat = tab.context.new_page()
        chat.goto("/chat")
        expect(chat.locator("#status")).to_have_text("Live")
        chat.get_by_text("Settings").click()
        chat.get_by_label("Tokens at most").fill("40")
        for number in (1, 2):
            say(chat, "hello")
            expect(board.locator("#events li", has_text="was answered")).to_have_count(number)
            expect(board.locator("#model-name")).to_have_text("no model is loaded")
        expect(board.locator("#map .cell")).to_have_count(0)
        with server.http() as http:
            assert http.delete("/dashboard/cache").status_code == 409
        tab.check()
        tab.context.close()


def test_the_page_asks_for_the_key_and_shows_what_is_of_it(browser: Browser, locked: Served) -> None:
    ask(locked, ["one"], "key-of-ada", max_tokens=60)
    tab = Tab(browser, locked.url)
    page = tab.open("/")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("There is no API key")
    dialog.get_by_label("API key").fill("wrong")
    dialog.get_by_role("button", name="Go on").click()
    expect(dialog).to_contain_text("The API key is wrong")
    dialog.get_by_label("API key").fill("key-of-bob")
    dialog.get_by_role("button", name="Go on").click()
    expect(page.locator("#status")).to_have_text("Live")
    expect(page.locator("#map-empty")).to_be_visible()
    ask(locked, ["two"], "key-of-bob", max_tokens=40)
    expect(page.locator(".conversation")).to_have_count(1)
    expect(page.locator("#map .cell").first).to_be_visible()
    assert len(state(locked, "key-of-ada")["conversations"]) == 1
    tab.errors = [error for error in tab.errors if "401" not in error]  # the browser tells of those itself
    tab.check()
    tab.context.close()


def test_a_key_is_told_and_changes_nothing_of_another(locked: Served) -> None:
    ask(locked, ["secret of ada, which is long enough for some blocks of thirty-two tokens"], "key-of-ada")
    before = state(locked, "key-of-bob")
    ask(locked, ["another secret of ada"], "key-of-ada")
    after = state(locked, "key-of-bob")
    assert json.dumps(before) == json.dumps(after)
    assert (after["who"]["whole"], after["who"]["may_act"]) == (False, True)
    ada = state(locked, "key-of-ada")
    name = next(iter(ada["conversations"]))
    only_ada = max(ada["conversations"], key=lambda one: int(one[1:]))
    with locked.http(headers={"Authorization": "Bearer key-of-bob"}) as http:
        if only_ada not in after["conversations"]:
            for method, path in (
                ("DELETE", only_ada),
                ("PUT", f"{only_ada}/pin"),
                ("DELETE", f"{only_ada}/pin"),
            ):
                reply = http.request(method, f"/dashboard/conversations/{path}")
                assert reply.status_code == 400
                assert "no conversation" in reply.json()["error"]["message"]
        http.delete("/dashboard/cache")
    assert state(locked, "key-of-bob")["cells"]["rows"] == []
    assert state(locked, "key-of-ada")["cells"] == ada["cells"]
    assert name in state(locked, "key-of-ada")["conversations"]


def test_the_metrics_key_sees_how_much_and_not_whose(locked: Served) -> None:
    ask(locked, ["something"], "key-of-ada")
    seen = state(locked, METRICS_KEY)
    assert seen["conversations"] == {}
    assert seen["cells"]["rows"]
    assert all(row[4] == [] for row in seen["cells"]["rows"])
    assert (seen["who"]["whole"], seen["who"]["may_act"]) == (True, False)
    with locked.http(headers={"Authorization": f"Bearer {METRICS_KEY}"}) as http:
        assert http.delete("/dashboard/cache").status_code == 401
        assert http.get("/v1/models").status_code == 401


def test_without_a_key_there_are_pages_and_nothing_on_them(locked: Served) -> None:
    with locked.http() as http:
        for path in ("/", "/chat", "/dashboard/assets/live.js", "/dashboard/assets/vendor/uplot.LICENSE"):
            reply = http.get(path)
            assert reply.status_code == 200
            assert "default-src 'none'" in reply.headers["content-security-policy"]
        for path in ("/dashboard/state", "/dashboard/events"):
            assert http.get(path).status_code == 401
        assert http.delete("/dashboard/cache").status_code == 401
        missing = http.get("/dashboard/assets/../routes.py")
        assert missing.status_code in (401, 404)
        assert http.get("/dashboard/assets/vendor/..%2f..%2froutes.py").status_code == 404


def test_events_begin_with_everything_and_go_on_with_what_changes(shown: Served) -> None:
    with shown.http() as http, http.stream("GET", "/dashboard/events") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = (line[6:] for line in reply.iter_lines() if line.startswith("data: "))
        first = json.loads(next(lines))
        assert set(first) == {"who", "models"}
        ask(shown, ["Write a sentence about tides."])
        while "conversations" not in (model := json.loads(next(lines))["models"]["smollm2"]):
            pass
        assert "model" not in model
