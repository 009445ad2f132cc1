"""A headless Chromium, driven over its own pipe by the DevTools protocol, with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

_REDIRECT = """
import fcntl, os, sys
to_read, to_write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(to_read, 3)
os.dup2(to_write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser():
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page; a context manager."""

    def __init__(self, path, *, width=1280, height=1600):
        self._folder = tempfile.TemporaryDirectory(prefix="ckstore-browser-", ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = [
            path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}",
            f"--window-size={width},{height}", "--force-color-profile=srgb", "about:blank",
        ]  # fmt: skip
        # The browser takes descriptors 3 and 4, whatever their numbers are here.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _REDIRECT, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, None
        self.events = []
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self):
        deadline = time.monotonic() + 60
        # It answers before its first page is there.
        while not (
            targets := [info for info in self.call("Target.getTargets")["targetInfos"] if info["type"] == "page"]
        ):
            assert time.monotonic() < deadline, "the browser opens no page"
            time.sleep(0.05)
        (target, *_) = targets
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the browser."""
        self._process.kill()
        self._process.wait()
        for fd in (self._to, self._from):
            os.close(fd)
        self._folder.cleanup()

    def call(self, method, **parameters):
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self.events.append(found)

    def _receive(self, seconds=60.0):
        deadline = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            block = os.read(self._from, 1 << 20)
            assert block, "the browser has ended"
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, url):
        """Load a page, and wait until it is there."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def ask(self, expression):
        """Return what a JavaScript expression gives."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found.get('exceptionDetails')}"
        return found["result"].get("value")

    def click(self, selector):
        """Click with the mouse in the middle of the first element that matches."""
        place = self.ask(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def press(self, key, *, code=None):
        """Press a key."""
        number = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}.get(key, 0)
        text = {"Enter": "\r"}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=code or key, windowsVirtualKeyCode=number, **more
            )

    def type(self, text):
        """Type text into what has the focus."""
        self.call("Input.insertText", text=text)

    def prefer(self, scheme):
        """Let the system prefer light or dark pages."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def resize(self, width, height):
        """Give the page another size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path, *, whole=True):
        """Write what the page looks like into a .png file."""
        clip = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    @property
    def complaints(self):
        """What the page has said on its console, thrown, or been refused."""
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in kinds]

    @property
    def requests(self):
        """The addresses of everything that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
