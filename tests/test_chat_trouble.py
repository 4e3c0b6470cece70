"""The chat page when things fail: refusals, a missing key, a server that goes away, streams cut short, damaged storage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.chat_browser import Page, conversation, needs_browser, question
from tests.server_process import ServerProcess, serving

pytestmark = needs_browser


def test_a_refusal_is_one_clear_line(server: ServerProcess, page: Page) -> None:
    page.open(server.url, conversation(sampling={"max_tokens": 5000}))
    page.send("Hello")
    page.until(lambda: page.get("#error").is_displayed())
    assert re.fullmatch(r"The server refused \(400\): .*context.*", page.text("#error-text"))
    assert [m["role"] for m in page.stored[0]["messages"]] == ["user"]  # kept, to be sent again
    page.click("#settings-open")
    page.get("#sampling-max_tokens").send_keys(Keys.CONTROL + "a" + Keys.NULL + "4")
    page.key(Keys.ESCAPE)
    page.click("#error-retry")
    assert page.ended()
    assert not page.get("#error").is_displayed()


def test_api_key_and_a_server_that_goes_away(smollm2_path: Path, page: Page) -> None:
    with serving(smollm2_path, "--slots", "1", "--ctx-per-slot", "512", "--api-key", "open sesame") as own:
        page.open(own.url, conversation())
        assert page.text("#model-name") == "API key needed"
        page.send("Hello")
        page.until(lambda: page.get("#settings").is_displayed())
        assert page.driver.switch_to.active_element.get_attribute("id") == "api-key"
        assert page.text("#error-text").startswith("The server wants an API key")
        page.key("open sesame" + Keys.TAB)
        page.until(lambda: page.get("#model").get_attribute("data-state") == "ready")
        assert page.js("return JSON.stringify(localStorage)").count("sesame") == 0
        page.click("#api-key-remember")
        assert page.js("return localStorage['m40llm.api-key']") == "open sesame"
        page.key(Keys.ESCAPE)
        page.click("#error-retry")
        assert page.ended()
        page.click("#settings-open")
        page.click("#api-key-remember")
        page.key(Keys.ESCAPE)
        assert page.js("return localStorage['m40llm.api-key'] ?? null") is None

        own.stop()
        page.send("Are you there?")
        page.until(lambda: page.get("#error").is_displayed())
        assert "m40llm serve" in page.text("#error-text")
        page.until(lambda: page.text("#model-name") == "not connected")


STREAM = """
const [pieces, ended, wait] = arguments;
const enc = new TextEncoder();
window.fetch = async () => new Response(new ReadableStream({async start(c) {
  for (const p of pieces) { c.enqueue(enc.encode(p)); await new Promise((r) => setTimeout(r, wait)); }
  if (ended) c.close(); else c.error(new TypeError('network error'));
}}), {status: 200});
"""


def chunk(**delta: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"


def test_reasoning_has_a_block_of_its_own(server: ServerProcess, page: Page) -> None:
    """The small models do not reason, so the stream is written here; it is cut inside a character and an event."""
    page.open(server.url, conversation())
    text = (
        ": keep-alive\n\n"
        + chunk(reasoning_content="Let me ")
        + chunk(reasoning_content="think.")
        + chunk(content="Yes!")
    )
    page.js(STREAM, [text[:40], text[40:90], text[90:], "data: [DONE]\n\n"], True, 150)
    page.send("Well?")
    page.until(lambda: page.all(".reasoning[open]"))  # open while it thinks
    assert page.ended() == "Yes!"
    assert page.text(".thought") == "Let me think."
    assert re.fullmatch(r"Thought for \d+\.\d s", page.text(".reasoning summary"))
    assert page.all(".reasoning[open]") == []


@pytest.mark.parametrize(
    ("pieces", "ended", "want"),
    [
        ([chunk(content="Half")], True, "The connection closed before the answer was complete."),
        ([chunk(content="Half")], False, "The connection to the server broke."),
        ([chunk(content="Half"), 'data: {"error": {"message": "it broke"}}\n\n'], True, "The server gave up: it broke"),
    ],
)
def test_an_answer_cut_short_says_so_and_is_kept(
    server: ServerProcess, page: Page, pieces: list[str], ended: bool, want: str
) -> None:
    page.open(server.url, conversation())
    page.js(STREAM, pieces, ended, 20)
    assert page.ask("Well?") == "Half"
    assert page.text(".message-error") == want
    assert page.reload().text(".message-error") == want


def test_a_damaged_entry_is_left_alone_and_said(server: ServerProcess, page: Page) -> None:
    page.open(server.url, conversation(question("q")), {"id": "bad", "messages": "none"})
    assert page.text("#error-text").startswith("1 stored conversation could not be read")
    assert len(page.all(".conversation")) == 1
    assert len(page.stored) == 2
