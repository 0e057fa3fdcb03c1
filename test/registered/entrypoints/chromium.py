"""An installed Chromium, driven by playwright.

Without one the tests are skipped, which the suite counts; where `SGLANG_TEST_BROWSER` names the
browser, it has to be there.
"""

import os
import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright

VARIABLE = "SGLANG_TEST_BROWSER"
NAMES = ("chromium", "chromium-browser", "google-chrome")
# no GPU here, and containers have a small /dev/shm
FLAGS = ["--disable-gpu", "--disable-dev-shm-usage"]


@contextmanager
def browser():
    """A headless browser of its own. Skips the test where none is installed."""
    named = os.environ.get(VARIABLE)
    path = named or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no Chromium: `apt-get install chromium`, or set {VARIABLE} to its path")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


class Watch:
    """What went wrong on a page: exceptions, and what its security policy stopped."""

    def __init__(self, page):
        self.errors = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._said)

    def _said(self, message):
        # An answer of 400 or 503 is an error on the console too; those are the tests' own.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)
