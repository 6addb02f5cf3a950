"""A headless Chromium, driven through ChromeDriver by the W3C WebDriver protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megagraph_cli.launch import free_port

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,1600",
]
START_S, CALL_S = 60.0, 60.0


def missing() -> str | None:
    """What a browser test lacks here; None where nothing is missing."""
    return next(
        (f"there is no {name} on the path" for name in ("chromium", "chromedriver") if not shutil.which(name)), None
    )


class Browser:
    """One session; every call has a deadline."""

    def __init__(self, address: str, profile: Path) -> None:
        self._address = address
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, page: Path) -> None:
        """Show a file; what was logged before, for the browser's own first page, is forgotten."""
        self._call("POST", f"{self._session}/url", {"url": "about:blank"})
        for kind in ("browser", "performance"):
            self._log(kind)
        self._call("POST", f"{self._session}/url", {"url": page.resolve().as_uri()})

    def script(self, body: str) -> Any:
        """What a function with this body returns in the page."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": body, "args": []})

    def console(self) -> list[str]:
        """Every message that the page left in the console: errors, refused loads, violations."""
        return [entry["message"] for entry in self._log("browser")]

    def requested(self) -> list[str]:
        """Every address that the page asked for."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def quit(self) -> None:
        self._call("DELETE", self._session)

    def _log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("POST", f"{self._session}/se/log", {"type": kind})
        return found

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._address + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:500]}") from error


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile lies in ``folder``; it and its driver are gone when the block ends."""
    port = free_port()
    with (folder / "chromedriver.log").open("w") as log:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{port}"
            _await(address)
            session = Browser(address, folder / "profile")
            try:
                yield session
            finally:
                session.quit()
        finally:
            driver.terminate()
            try:
                driver.wait(30)
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait()


def _await(address: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/status", timeout=5) as answer:
                if json.load(answer)["value"]["ready"]:
                    return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("chromedriver did not start in time")
