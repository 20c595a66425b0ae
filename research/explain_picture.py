"""Takes the picture of an explained prompt that the README shows, with Debian's Chromium.

python -m research.explain_picture out/demo/explain.html docs/explain.png
"""

from __future__ import annotations

import base64
import sys
import time
from pathlib import Path

from selenium import webdriver

WIDTH = 1280
SCALE = 1.25
BOTTOM = "return document.getElementById('maps').getBoundingClientRect().bottom + scrollY + 12"


def take(page: Path, *, dark: bool = False) -> bytes:
    """A PNG of the page's top, down to the end of its maps."""
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},900"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        metrics = {"width": WIDTH, "height": 900, "deviceScaleFactor": SCALE, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(page.resolve().as_uri())
        while not driver.execute_script("return document.documentElement.dataset.ready === 'yes'"):
            time.sleep(0.05)
        time.sleep(1)  # the maps are unpacked and drawn after the page is ready
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": driver.execute_script(BOTTOM), "scale": 1}
        shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        return base64.b64decode(shot["data"])
    finally:
        driver.quit()


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(take(Path(sys.argv[1])))
