"""A headless Chromium that a test drives: its DevTools protocol over two pipes, no package needed.

Source: https://chromedevtools.github.io/devtools-protocol (Target, Runtime, Page, Input).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path


NAMES = ("chromium", "chromium-browser", "google-chrome")


def installed() -> str | None:
    """Where a Chromium is, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a Chromium with a profile of its own in `folder`; a context manager."""

    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 900)) -> None:
        theirs_in, ours_out = (self._away(fd) for fd in os.pipe())
        ours_in, theirs_out = (self._away(fd) for fd in os.pipe())
        # it reads commands from file 3 and writes answers to file 4
        redirected = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash"]
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}"]
        self._process = subprocess.Popen(
            [*redirected, installed(), *options], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._read, self._number, self._session = ours_in, ours_out, b"", 0, None

    @staticmethod
    def _away(fd: int) -> int:
        """The same file under a number that 3 and 4 don't overwrite."""
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
        os.close(fd)
        return moved

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, *, timeout: float = 60, **params) -> dict:
        """Answer to a command. Raises: RuntimeError with what Chromium says; TimeoutError."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            while b"\0" in self._read:
                text, _, self._read = self._read.partition(b"\0")
                answer = json.loads(text)
                if answer.get("id") == self._number:
                    if "error" in answer:
                        raise RuntimeError(f"{method}: {answer['error']}")
                    return answer["result"]
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise TimeoutError(f"{method}: no answer within {timeout} s")
            chunk = os.read(self._in, 1 << 16)
            if not chunk:
                raise RuntimeError(f"{method}: the browser has ended")
            self._read += chunk

    def open(self, address: str) -> None:
        """Open a page; what follows is about it."""
        target = self.call("Target.createTarget", url=address)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def run(self, script: str):
        """Value of a JavaScript expression on the page. Raises: RuntimeError where it throws."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait(self, script: str, timeout: float = 120):
        """Value of an expression as soon as it is true. Raises: TimeoutError."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.2)
        raise TimeoutError(
            f"{script}: not true within {timeout} s; the page says: {self.run('document.body.innerText')}"
        )

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """With the left mouse button, in pixels of the window."""
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", stop), ("mouseReleased", stop)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)

    def screenshot(self, path: Path) -> None:
        """What the window shows, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
