"""Chromium without a window, driven over its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    # commands come on descriptor 3, answers go to descriptor 4
    "--remote-debugging-pipe",
)
# the page marks its root when it has drawn itself
_READY = """new Promise((done) => {
  const root = document.documentElement;
  const look = () => root.dataset.ready && done(true);
  new MutationObserver(look).observe(root, { attributes: true });
  look();
})"""
# the shell puts the pipes at the descriptors that chromium expects
_SHELL = 'exec "$0" "${@:3}" 3<&"$1" 4>&"$2"'


class Tab:
    """One tab. Errors of the page and of its policy are kept in ``errors``."""

    def __init__(self, commands, answers) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._session, self._read = 0, None, b""
        self._n_loaded, self._top, self._frame = 0, None, None
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        self._top, self._frame = self._session, None
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.size(1400, 900)

    def send(self, method, **params):
        """Send a command, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            got = json.loads(self._next())
            if got.get("id") == self._number:
                assert "error" not in got, got["error"]
                return got["result"]
            self._note(got)

    def _next(self):
        """The next message, which ends with a zero byte."""
        while b"\0" not in self._read:
            self._read += os.read(self._answers, 1 << 20)
        message, _, self._read = self._read.partition(b"\0")
        return message

    def _note(self, event):
        params = event.get("params", {})
        self._n_loaded += event["method"] == "Page.loadEventFired"
        if event["method"] == "Target.attachedToTarget":
            self._frame = params["sessionId"]
        if event["method"] == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description"))
        elif (
            event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error"
        ):
            self.errors.append(params["entry"]["text"])

    def size(self, width, height):
        """The size of the window, in pixels. Commands go to its page again."""
        self._session = self._top or self._session
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, value):
        """Prefer "dark" or "light" colours."""
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def open_frame(self, url):
        """Load a page, and go to its one frame, which has a process of its own."""
        self.send("Page.navigate", url="about:blank")
        self.send(
            "Target.setAutoAttach",
            autoAttach=True,
            flatten=True,
            waitForDebuggerOnStart=False,
        )
        self.send("Page.navigate", url=url)
        while self._frame is None:
            self._note(json.loads(self._next()))
        self._session, self._frame = self._frame, None
        self.send("Runtime.enable")
        self.run(_READY)

    def open(self, url):
        """Load a page and wait until it is drawn."""
        # another document first: a change of the hash alone would load nothing
        for address in ("about:blank", url):
            loaded = self._n_loaded
            self.send("Page.navigate", url=address)
            while self._n_loaded == loaded:
                self._note(json.loads(self._next()))
        self.run(_READY)

    def run(self, script):
        """The value of an expression of the page, or of its promise."""
        got = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def go(self, **state):
        """Change the state of the page, and wait until it is shown."""
        self.run(f"TK.app.go({json.dumps(state)}).then(() => true)")

    def key(self, text):
        """Press a key, and wait until what it does is shown."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=text, text=text)
        self.run("TK.app.shown")

    def click(self, selector, x=None):
        """Click an element, at ``x`` pixels from its left edge or in its centre."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x, b.y, b.width, b.height]; })()"
        )
        place = {
            "x": box[0] + (box[2] / 2 if x is None else x),
            "y": box[1] + box[3] / 2,
        }
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                button="left",
                clickCount=1,
                **place,
            )
        self.run("TK.app.shown")

    def text(self, selector):
        """The text of an element as the page shows it."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector):
        """The texts of all such elements."""
        return self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            ".map((one) => one.innerText)"
        )

    def picture(self, path: Path):
        """Write a PNG of the window."""
        got = self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(got["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """A new browser with one tab, whose files are in ``folder``."""
    (get, commands), (answers, give) = os.pipe(), os.pipe()
    arguments = [CHROMIUM, str(get), str(give), *_OPTIONS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["bash", "-c", _SHELL, *arguments],
        pass_fds=(get, give),
        stderr=subprocess.DEVNULL,
    )
    os.close(get)
    os.close(give)
    try:
        with os.fdopen(commands, "wb") as pipe:
            yield Tab(pipe, answers)
    finally:
        os.close(answers)
        process.kill()
        process.wait()
