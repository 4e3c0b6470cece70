"""The chat page in a real Chromium against a real `m40llm serve`: its files, and what a user asks and keeps."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.chat_browser import Page, conversation, needs_browser, question, reply
from tests.server_process import ServerProcess

# ---- over HTTP, without a browser


class References(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]
        if (tag == "script" and "src" not in values) or tag == "style":
            self.inline.append(tag)
        self.inline += [k for k in values if k.startswith("on") or k == "style"]


def test_every_file_of_the_page_comes_with_its_policy_type_and_etag(server: ServerProcess) -> None:
    index = server.get("/")
    assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    html = References(index.body.decode())
    assert html.inline == []
    modules = ["static/chat.js"]
    for name in modules:  # grows: what a module imports is served too
        source = server.get(f"/{name}").body.decode()
        modules += [n for m in re.findall(r'from "\./([\w.]+)"', source) if (n := f"static/{m}") not in modules]
    assert len(modules) == 8
    for path in {*html.found, *modules}:
        got = server.get(f"/{path}")
        assert got.status == 200, path
        assert got.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in got.headers["content-security-policy"]
        assert "unsafe" not in got.headers["content-security-policy"]
        again = server.get(f"/{path}", **{"If-None-Match": got.headers["etag"]})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", got.headers["etag"])
        assert server.get(f"/{path}", **{"If-None-Match": '"other"'}).status == 200


@pytest.mark.parametrize("path", ["/static/none.js", "/static/", "/static/..%2fapp.py", "/static/%2e%2e/app.py"])
def test_nothing_but_the_page_is_served(server: ServerProcess, path: str) -> None:
    assert server.get(path).status == 404


# ---- in the browser


def api_answer(server: ServerProcess, *messages: dict[str, Any], max_tokens: int = 24) -> dict[str, Any]:
    body = {"messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
    got = server.post("/v1/chat/completions", body)
    assert got.status == 200
    found = got.json
    assert isinstance(found, dict)
    return found


@needs_browser
def test_an_answer_streams_and_equals_the_one_of_the_api(server: ServerProcess, page: Page) -> None:
    page.open(server.url, conversation(sampling={"temperature": 0, "max_tokens": 80}))
    assert page.text("#model-name") == server.get("/v1/models").json["data"][0]["id"]
    page.send("Write a long story about a lighthouse.")
    lengths: set[int] = set()
    while page.running:
        lengths.add(len(page.text(".assistant .prose")))
        time.sleep(0.05)
    assert len(lengths) > 3, "the text came at once"
    want = api_answer(server, question("Write a long story about a lighthouse."), max_tokens=80)
    (stored,) = page.stored
    assert stored["messages"][1]["content"] == want["choices"][0]["message"]["content"]
    stats = page.text(".assistant .stats")
    assert re.search(r"\d tok/s", stats)
    assert re.search(r"TTFT \d+\.\d\d s", stats)
    assert f"{want['usage']['completion_tokens']} tokens" in stats
    assert f"of {want['usage']['prompt_tokens']} prompt tokens cached" in stats
    assert "token limit reached" in stats
    assert page.driver.get_log("browser") == []  # also: nothing ran into the content policy
    outside = "return performance.getEntriesByType('resource').map((e) => e.name).filter((n) => !n.startsWith(origin))"
    assert page.js(outside) == []


@needs_browser
def test_escape_stops_an_answer_here_and_on_the_server(server: ServerProcess, page: Page) -> None:
    page.open(server.url, conversation(sampling={"temperature": 0, "max_tokens": 900}))
    done = len(server.requests)
    page.send("Write a long story about a lighthouse.")
    page.until(lambda: len(page.text(".assistant .prose")) > 20)
    page.key(Keys.ESCAPE)
    text = page.ended()
    assert "stopped" in page.text(".stats")
    server.wait_for(lambda: len(server.requests) > done)
    assert server.requests[-1]["generated_tokens"] < 900
    server.wait_for(server.idle)
    assert page.reload().text(".assistant .prose") == text
    page.click(".regenerate")
    page.until(lambda: page.text(".assistant .prose"))
    page.click("#stop")
    page.ended()
    assert "stopped" in page.text(".stats")


@needs_browser
def test_regenerate_edit_and_system_prompt(server: ServerProcess, page: Page) -> None:
    page.open(server.url, conversation())
    first = page.ask("Name a colour.")
    page.click(".regenerate")
    assert (page.ended(), len(page.all(".message"))) == (first, 2)
    # the same prompt again: all of it but the last token was in the slot
    cached, prompt = map(int, re.findall(r"(\d+) of (\d+) prompt", page.text(".stats"))[0])
    assert cached == prompt - 1

    page.ask("And a fruit.")
    page.click(".message:nth-child(1) .edit")
    area = page.get(".edit-area")
    assert area.get_attribute("value") == "Name a colour."
    area.send_keys(Keys.CONTROL + "a" + Keys.NULL + "Name a river." + Keys.ENTER)
    edited = page.ended()
    assert [m.get_attribute("class") for m in page.all(".message")] == ["message user", "message assistant"]
    want = api_answer(server, question("Name a river."))["choices"][0]["message"]["content"]
    assert page.stored[0]["messages"][1]["content"] == want
    assert edited

    page.click("#settings-open")
    page.get("#system").send_keys("Answer in French.")
    page.get("#sampling-max_tokens").send_keys(Keys.CONTROL + "a" + Keys.NULL + "0")
    assert "1 or more" in page.text("#sampling-max_tokens-error")
    page.get("#sampling-max_tokens").send_keys(Keys.CONTROL + "a" + Keys.NULL + "9")
    page.key(Keys.ESCAPE)
    page.click(".regenerate")
    page.ended()
    system = {"role": "system", "content": "Answer in French."}
    want = api_answer(server, system, question("Name a river."), max_tokens=9)["choices"][0]["message"]["content"]
    (stored,) = page.stored
    assert stored["messages"][1]["content"] == want
    assert (stored["system"], stored["sampling"]) == ("Answer in French.", {"temperature": 0, "max_tokens": 9})


@needs_browser
def test_conversations_are_kept_renamed_exported_deleted_and_restored(
    server: ServerProcess, page: Page, tmp_path: Path
) -> None:
    page.open(server.url, conversation(question("q"), reply("a"), name="c1"), conversation(question("r"), name="c2"))
    assert page.text("#title") == "Title c1"
    page.click("[data-id=c2] .conversation-open")
    assert (page.text("#title"), page.text(".bubble")) == ("Title c2", "r")
    page.click("[data-id=c2] [title=Rename]")
    page.get(".rename").send_keys(Keys.CONTROL + "a" + Keys.NULL + "My name" + Keys.ENTER)
    assert page.reload().text("#title") == "My name"

    page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.click("[data-id=c2] [title='Export as JSON']")
    file = tmp_path / "My-name.json"
    page.until(file.exists)
    assert json.loads(file.read_text())["messages"] == [question("r")]

    page.click("[data-id=c2] [title=Delete]")
    assert [c["id"] for c in page.stored] == ["c1"]
    assert page.text("#title") == "New chat"
    page.click("#toast-action")
    assert sorted(c["id"] for c in page.stored) == ["c1", "c2"]
    assert page.text("#title") == "My name"
    page.click("#new-chat")
    page.ask("A first message that names the conversation")
    assert page.text("#title") == "A first message that names the conversation"
    assert len(page.stored) == 3
