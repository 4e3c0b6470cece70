"""The chat page, what a user sees: Markdown, markup that stays text, the theme, a narrow screen."""

from __future__ import annotations

import re
import time

import pytest

from tests.chat_browser import Page, conversation, needs_browser, question, reply
from tests.server_process import ServerProcess

pytestmark = needs_browser

ATTACK = '<img src=x onerror="window.hit=1"><script>window.hit=2</script><b>b</b>[x](javascript:window.hit=3)'


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


def test_markdown(server: ServerProcess, page: Page) -> None:
    page.open(server.url, conversation(question("q"), reply(MARKDOWN)))
    html = str(page.js("return document.querySelector('.prose').innerHTML"))
    html = re.sub(r'<div class="code-head">.*?</button></div>|</?div[^>]*>| target="_blank"', "", html)
    html = re.sub(r' (tabindex|data-align)="\w+"', "", html)
    assert html == RENDERED
    assert [span.text for span in page.all(".code-head > span")] == ["text", "py"]


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
