"""A headless Chromium that runs pages for tests; without further packages."""

import base64
import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import time

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """One page of a browser, which is told what to do through its debugging pipe.

    Args:
        folder: an empty folder for what the browser writes.
        size: width and height of the window.
    """

    def __init__(self, folder: pathlib.Path, size: tuple[int, int] = (1200, 800)):
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={folder}", "--window-size={},{}".format(*size)]
        # It reads from descriptor 3, and writes to 4.
        command = f'exec "$0" "$@" 3<&{read} 4>&{write}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, *flags, "about:blank"],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read), os.close(write)
        self._ids, self._rest, self._session = itertools.count(1), b"", {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **params) -> dict:
        """Calls a method of the DevTools protocol, and returns its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                if not (more := os.read(self._read, 2**16)):
                    raise RuntimeError("the browser ended")
                self._rest += more
            answer, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(answer)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def evaluate(self, expression: str):
        """Returns the value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            assert time.monotonic() < end, self.evaluate("document.body.innerText")
            time.sleep(0.05)

    def screenshot(self) -> bytes:
        """Returns what the window shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._write)
        os.close(self._read)
        self._process.terminate()
        self._process.wait(30)


@contextlib.contextmanager
def browsing(folder: pathlib.Path, **options):
    """Yields a browser, and ends it."""
    browser = Browser(folder, **options)
    try:
        yield browser
    finally:
        browser.close()
