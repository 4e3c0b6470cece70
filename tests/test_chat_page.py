"""The chat page in a real Chromium against a real `m40llm serve`: what a user sees, does and loses when things fail."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.server_process import ServerProcess, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMEDRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and CHROMEDRIVER), reason="no Chromium here: apt-get install chromium chromium-driver"
)
T = TypeVar("T")


class Page:
    """The page in a browser, as a user meets it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.url = ""

    def open(self, url: str, *conversations: dict[str, Any]) -> Page:
        """The page with nothing stored but `conversations`; the first one is shown."""
        self.url = url
        self.driver.get(f"{url}/static/icon.svg")  # same origin, no scripts: storage can be set before the page runs
        self.js(
            "localStorage.clear(); sessionStorage.clear();"
            "for (const c of arguments[0]) localStorage.setItem('m40llm.conversation.' + c.id, JSON.stringify(c));"
            "if (arguments[0].length) localStorage.setItem('m40llm.last', arguments[0][0].id);",
            list(conversations),
        )
        return self.reload()

    def reload(self) -> Page:
        self.driver.get(self.url + "/")
        self.until(lambda: self.get("#model").get_attribute("data-state") != "connecting")
        return self

    def js(self, script: str, *args: Any) -> Any:
        return self.driver.execute_script(script, *args)

    def get(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str) -> str:
        return str(self.js("return document.querySelector(arguments[0])?.textContent ?? ''", css))

    def click(self, css: str) -> None:
        self.js("document.querySelector(arguments[0]).click()", css)

    def until(self, condition: Callable[[], T], seconds: float = 60) -> T:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"did not happen; the page says: {self.get('body').text[:800]}"
            time.sleep(0.05)
        return value

    def send(self, text: str) -> None:
        self.get("#input").send_keys(text + Keys.ENTER)

    @property
    def running(self) -> bool:
        return bool(self.js("return !document.getElementById('stop').hidden"))

    def ask(self, text: str) -> str:
        self.send(text)
        return self.ended()

    def ended(self) -> str:
        """The last answer, once it is complete."""
        self.until(lambda: not self.running)
        return self.text("#messages > :last-child .prose")

    @property
    def stored(self) -> list[dict[str, Any]]:
        found = self.js(
            "return Object.entries(localStorage)"
            ".filter(([k]) => k.startsWith('m40llm.conversation.')).map(([, v]) => JSON.parse(v))"
        )
        assert isinstance(found, list)
        return found

    def key(self, name: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(name).perform()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}", "--window-size=1200,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))
    yield chrome
    chrome.quit()


@pytest.fixture
def page(driver: webdriver.Chrome) -> Iterator[Page]:
    driver.get_log("browser")  # empties it
    yield Page(driver)
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def conversation(*messages: dict[str, Any], name: str = "c1", **more: Any) -> dict[str, Any]:
    greedy = {"temperature": 0, "max_tokens": 24}
    base = {"id": name, "title": f"Title {name}", "created": 1, "updated": 1, "system": "", "sampling": greedy}
    return {**base, "messages": list(messages), **more}


def question(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "state": "done", **more}


def api_answer(server: ServerProcess, *messages: dict[str, Any], max_tokens: int = 24) -> dict[str, Any]:
    body = {"messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
    got = server.post("/v1/chat/completions", body)
    assert got.status == 200
    found = got.json
    assert isinstance(found, dict)
    return found


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


ATTACK = '<img src=x onerror="window.hit=1"><script>window.hit=2</script><b>b</b>[x](javascript:window.hit=3)'


@needs_browser
def test_markup_in_messages_stays_text(server: ServerProcess, page: Page) -> None:
    fenced = f"{ATTACK}\n\n```html\n{ATTACK}\n```\n\n- {ATTACK}\n\n| a |\n|---|\n| {ATTACK} |"
    chat = conversation(question(ATTACK), reply(fenced, reasoning=ATTACK, error=ATTACK), title=ATTACK)
    page.open(server.url, chat)
    page.ask(ATTACK)
    time.sleep(0.2)
    assert page.js("return window.hit") is None
    assert page.all("#messages :is(img, script, b, a)") == []
    assert page.text(".message:nth-child(1) .bubble") == page.text(".message:nth-child(3) .bubble") == ATTACK
    assert page.text(".message:nth-child(2) pre") == ATTACK
    assert page.text("#title") == ATTACK
    assert page.driver.get_log("browser") == []


MARKDOWN = """# One
Text with **bold**, *it*, ***both***, `a*b*c`, ~~x~~, snake_case_word, 2 * 3 * 4, \\*plain\\*
second line

3. three
   - deep
     ```
     code <i>
     ```
4. four

> quoted [site](https://example.org/a_(b)) https://example.org/x, [no](ftp://example.org)

| l | r |
|---|--:|
| 1 | `2` |

---
```py
unclosed
"""
RENDERED = (
    "<h3>One</h3>"
    "<p>Text with <strong>bold</strong>, <em>it</em>, <strong><em>both</em></strong>, <code>a*b*c</code>, <del>x</del>, "
    "snake_case_word, 2 * 3 * 4, *plain*<br>second line</p>"
    '<ol start="3"><li>three<ul><li>deep<pre><code>code &lt;i&gt;</code></pre></li></ul></li><li>four</li></ol>'
    '<blockquote><p>quoted <a href="https://example.org/a_(b)" rel="noopener noreferrer nofollow">site</a> '
    '<a href="https://example.org/x" rel="noopener noreferrer nofollow">https://example.org/x</a>, '
    "[no](ftp://example.org)</p></blockquote>"
    "<table><thead><tr><th>l</th><th>r</th></tr></thead><tbody><tr><td>1</td><td><code>2</code></td></tr></tbody></table>"
    "<hr><pre><code>unclosed\n</code></pre>"
)


@needs_browser
def test_markdown(server: ServerProcess, page: Page) -> None:
    page.open(server.url, conversation(question("q"), reply(MARKDOWN)))
    html = str(page.js("return document.querySelector('.prose').innerHTML"))
    html = re.sub(r'<div class="code-head">.*?</button></div>|</?div[^>]*>| target="_blank"', "", html)
    html = re.sub(r' (tabindex|data-align)="\w+"', "", html)
    assert html == RENDERED
    assert [span.text for span in page.all(".code-head > span")] == ["text", "py"]


@needs_browser
@pytest.mark.parametrize(
    "piece",
    ["*a _b ", "[", "`` ` ", "> ", "- ", "**", "[](", "| ", "#  ", "a* ", "``` ` ", "- a\n", "> a\n\n", "|a|\n|-|\n"],
)
def test_hostile_markdown_is_rendered_in_no_time(server: ServerProcess, page: Page, piece: str) -> None:
    page.open(server.url)
    text = piece * (60_000 // len(piece))
    took = page.driver.execute_async_script(
        "const [text, done] = arguments; import('/static/markdown.js').then(({renderMarkdown}) => {"
        "const start = performance.now(); const made = renderMarkdown(text);"
        "done([performance.now() - start, made.childNodes.length]); });",
        text,
    )
    assert took[0] < 2000
    assert took[1] > 0


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


@needs_browser
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


@needs_browser
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


@needs_browser
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


@needs_browser
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


@needs_browser
def test_a_damaged_entry_is_left_alone_and_said(server: ServerProcess, page: Page) -> None:
    page.open(server.url, conversation(question("q")), {"id": "bad", "messages": "none"})
    assert page.text("#error-text").startswith("1 stored conversation could not be read")
    assert len(page.all(".conversation")) == 1
    assert len(page.stored) == 2


@needs_browser
def test_it_follows_the_systems_theme_until_told_otherwise(server: ServerProcess, page: Page) -> None:
    def background() -> str:
        return str(page.js("return getComputedStyle(document.body).backgroundColor"))

    page.open(server.url)
    light = background()
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    page.until(lambda: background() != light)
    page.click("#theme")
    assert background() == light
    assert page.reload().js("return document.documentElement.dataset.theme") == "light"
    page.click("#theme-system")
    assert background() != light


@needs_browser
def test_a_phone(server: ServerProcess, page: Page) -> None:
    metrics = {"width": 360, "height": 640, "deviceScaleFactor": 2, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = f"`{'x' * 200}`\n\n```\n{'y' * 200}\n```\n\n|{'a long cell|' * 9}\n|{'---|' * 9}\n"
    page.open(server.url, conversation(question("z" * 200), reply(MARKDOWN + "```\n" + wide)))
    assert page.js("return document.documentElement.scrollWidth") == 360
    assert page.js("const s = document.getElementById('scroller'); return s.scrollWidth - s.clientWidth") == 0
    assert not page.get(".new-chat").is_displayed()
    page.get("#sidebar-open").click()
    page.until(lambda: page.get(".new-chat").is_displayed())
    page.until(lambda: page.get("#sidebar").rect["x"] == 0)
    page.get("[data-id=c1] .conversation-open").click()
    page.until(lambda: not page.get(".new-chat").is_displayed())
    page.get("#input").send_keys("Hello")
    page.get("#send").click()
    assert page.ended()
