"""A headless Chromium, spoken to through chromedriver in W3C WebDriver's JSON over HTTP."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MISSING = next((f"{name} is not installed" for name in ("chromium", "chromedriver") if not shutil.which(name)), None)
_ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]


class Browser:
    """One session; errors of WebDriver are ``urllib.error.HTTPError``."""

    def __init__(self, port: int) -> None:
        self._root = f"http://127.0.0.1:{port}"
        options = {"args": _ARGUMENTS}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{session['sessionId']}"

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = None if method == "DELETE" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._root + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path, *, width: int = 1400, dark: bool = False, scripts: bool = True) -> None:
        """Shows a file in a window of that width."""
        self.devtools("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.resize(width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])
        self.log("performance")
        self.log("browser")
        self._ask("POST", f"{self._session}/url", {"url": path.as_uri()})

    def resize(self, width: int) -> None:
        """Makes the window that wide, in CSS pixels."""
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def run(self, script: str, *arguments: object) -> Any:
        """What a function body returns in the page."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": arguments})

    def devtools(self, command: str, **parameters: object) -> Any:
        """A command of the DevTools protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Entries of a log since it was last asked for."""
        return self._ask("POST", f"{self._session}/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """URLs that were asked for since the page was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        height = self.run("return Math.ceil(document.documentElement.getBoundingClientRect().height)")
        width = self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """Ends the session with its browser."""
        self._ask("DELETE", self._session)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; nothing of it is left afterwards."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        said = ""
        for line in driver.stdout:
            said += line
            if found := re.search(r"successfully on port (\d+)", line):
                break
        else:
            raise RuntimeError(f"chromedriver did not start: {said}")
        browser = Browser(int(found[1]))
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.communicate(timeout=30)
