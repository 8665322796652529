"""A headless Chromium for tests: opens pages as a person would, without network, and reports what they logged.

with Browser() as browser: page = browser.open(path); page.js("document.title"); page.click("#clear"); page.errors
It speaks the DevTools protocol over a pipe (--remote-debugging-pipe), so only Chromium must be installed.  With
SPEEDRUN_AXE=.../axe.min.js (npm install axe-core), axe also checks every page that a test opens for WCAG 2.2 AA and
best practices, in its light and its dark theme.
"""

import json
import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from bench.report.png import CHROMIUM

AXE = os.environ.get("SPEEDRUN_AXE")
OPTIONS = {"resultTypes": ["violations"], "preload": False}
OPTIONS |= {"rules": {"page-has-heading-one": {"enabled": False}}}  # tests also open parts of pages
AUDIT = f"axe.run(document, {json.dumps(OPTIONS)})"
AUDIT += """.then((found) => found.violations.map((rule) => rule.id + ": " + rule.help + ": " + rule.nodes.slice(0, 5)
    .map((node) => node.target.join(" ") + " " + node.failureSummary.slice(0, 300)).join("; ")))"""
needs_axe = pytest.mark.skipif(not AXE, reason="needs SPEEDRUN_AXE=.../axe.min.js, of npm install axe-core")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # offline even if the machine has a network
)


def needs_browser(test):
    """Marks a test that opens pages: CI runs all of them, ./run.sh test only those of test_site.py."""
    return pytest.mark.browser(pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to open a page")(test))


def look_at(*paths):
    """Asserts that pages log no errors, do not scroll sideways and are not cut off on paper, if there is a Chromium."""
    if CHROMIUM is None:
        return
    with Browser() as browser:
        for path in paths:
            for width in (1300, 400):
                page = browser.open(path, width=width)
                assert page.errors == [] and page.js("document.documentElement.scrollWidth") == width, (path, width)
            page = browser.open(path, width=720)  # of A4
            page.call("Emulation.setEmulatedMedia", media="print")
            cut = "[...document.querySelectorAll('td, pre')].filter(e => e.getBoundingClientRect().right > innerWidth)"
            assert page.js(f"{cut}.map(e => e.textContent)") == [], path
            colours = "[...document.querySelectorAll('.swatch, .u-marker, .waterfall i')].map(e => getComputedStyle(e))"
            assert page.js(f"{colours}.every(style => style.printColorAdjust === 'exact')"), path  # bars and legends


class Browser:
    def __init__(self, timeout_s=60):
        self._timeout_s, self._number, self._events = timeout_s, 0, []

    def __enter__(self):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = shlex.join([*FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}"])
        command = f"exec {CHROMIUM} {flags}"
        self._process = subprocess.Popen(  # Chromium reads from descriptor 3 and writes to 4
            ["bash", "-c", f"{command} about:blank 3<&{to_read} 4>&{to_write}"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest = b""
        return self

    def __exit__(self, *exc_info):
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def open(self, path, width=1200, height=900, dark=False):
        """Opens a file or URL and returns the loaded Page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        page.theme(dark)
        page.call("Page.navigate", url=str(path) if "://" in str(path) else Path(path).resolve().as_uri())
        loaded = ("Page.loadEventFired", session)
        self.wait_for(lambda: loaded in [(event["method"], event.get("sessionId")) for event in self._events])
        if AXE:
            for is_dark in (not dark, dark):
                page.theme(is_dark)
                theme, violations = "dark" if is_dark else "light", page.violations()
                assert not violations, "\n".join([f"{path}, {theme}, {width} px:", *violations])
        return page

    def call(self, method, session=None, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        number, deadline_s = self._number, time.monotonic() + self._timeout_s
        while True:
            reply = self._read(deadline_s)
            if reply.get("id") == number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def wait_for(self, holds):
        deadline_s = time.monotonic() + self._timeout_s
        while not holds():
            self._read(deadline_s)

    def _read(self, deadline_s):
        import select

        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            chunk = os.read(self._from, 1 << 20)
            if not chunk:
                raise RuntimeError("Chromium ended")
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        reply = json.loads(message)
        if "method" in reply:
            self._events.append(reply)
        return reply


class Page:
    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def theme(self, dark):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def violations(self):
        """Returns a sentence for each rule of axe that the page violates, with the elements."""
        if not self.js("typeof axe === 'object'"):
            self.call("Runtime.evaluate", expression=Path(AXE).read_text())
        return self.js(AUDIT)

    def js(self, expression):
        """Returns the value of a JavaScript expression; a promise is awaited."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails'].get('exception', {}).get('description')}")
        return reply["result"].get("value")

    def click(self, selector):
        """Clicks in the middle of the element with a real mouse event."""
        x, y = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text):
        """Types text key by key into the element that has the focus."""
        for char in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=char, text=char)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=char)

    def press(self, key):
        """Presses a key as a person does: Enter clicks the button or link that has the focus."""
        code, text = {"Enter": (13, "\r"), " ": (32, " "), "ArrowRight": (39, "")}[key]
        for kind in ("keyDown", "keyUp"):
            typed = text if kind == "keyDown" else ""
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=typed)

    def until(self, expression, timeout_s=10):
        """Waits until a JavaScript expression holds.  Raises AssertionError if it never does."""
        deadline_s = time.monotonic() + timeout_s
        while not self._holds(expression):
            assert time.monotonic() < deadline_s, f"never: {expression}"
            time.sleep(0.05)

    def _holds(self, expression):
        try:
            return self.js(expression)
        except RuntimeError as error:
            if "navigated" not in str(error):
                raise
            return False  # the page is navigating to another

    @property
    def text(self):
        return self.js("document.body.innerText")

    @property
    def errors(self):
        """Exceptions, console errors, and refused or failed loads so far."""
        self.js("0")  # reads the events that are pending
        texts = []
        for event in self._browser._events:
            if event.get("sessionId") != self._session:
                continue
            kind, params = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                texts.append(details.get("exception", {}).get("description") or details["text"])
            elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                texts.append(" ".join(str(arg.get("value")) for arg in params["args"]))
            elif kind == "Log.entryAdded" and params["entry"]["level"] == "error":
                texts.append(params["entry"]["text"])
        return texts

    @property
    def requests(self):
        """URLs that the page requested."""
        return [
            event["params"]["request"]["url"]
            for event in self._browser._events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def browser():
    """One Chromium for all tests of a module."""
    with Browser() as opened:
        yield opened
