"""The chat page in a real Chromium: what a test does to it and reads from it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

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
