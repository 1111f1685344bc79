"""A headless Chromium for tests of pages, driven through its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (found := shutil.which(name))), None)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "End": 35, "Home": 36}


class Browser:
    """One page. `problems`: what the page wrote to the console, exceptions that it raised, and violations of its policy; `requests`: addresses that it
    asked for."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = TemporaryDirectory(prefix="tilewright-browser-")
        (read_commands, self._write), (self._read, write_answers) = os.pipe(), os.pipe()
        arguments = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
            "--no-first-run", "--disable-background-networking", f"--user-data-dir={self._profile.name}", "about:blank",
        ]  # fmt: skip
        redirected = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'  # the protocol's descriptors are 3 and 4
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", *arguments],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded: set[str] = set()
        self._session = ""
        target = self._command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._command(f"{domain}.enable")
        self._command("Page.setLifecycleEventsEnabled", enabled=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)  # which ends the browser
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        shutil.rmtree(self._profile.name, ignore_errors=True)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            received = os.read(self._read, 1 << 20)
            assert received, "the browser has ended"
            self._rest += received
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.problems.append(" ".join(str(argument.get("value", argument.get("description"))) for argument in parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Page.lifecycleEvent" and parameters["name"] == "load":
            self._loaded.add(parameters["loaderId"])
        return message

    def _command(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def open(self, path: Path, width: int = 1280, height: int = 900, theme: str = "light", fragment: str = "") -> None:
        """Loads a file. `theme`: what the user prefers, "light" or "dark"."""
        self._command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self._command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.requests.clear()
        loader = self._command("Page.navigate", url=f"{path.resolve().as_uri()}?{next(self._numbers)}{fragment}")["loaderId"]
        while loader not in self._loaded:
            self._message()

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self._command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        """Presses a key of `KEYS` and lets it go."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            given = text if kind == "keyDown" else {}
            self._command(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key], modifiers=8 if shift else 0, **given
            )

    def picture(self, path: Path, whole: bool = False) -> None:
        """Writes a PNG of what is visible, or of the whole page."""
        data = self._command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))
