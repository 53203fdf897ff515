"""First screens of pages as golden images, compared with a tolerance."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageChops, ImageFilter

PICTURED = Path(__file__).parents[1] / "golden" / "pages"
# The share of a picture that may differ. Twice the same page: 0.0003; without its main chart: 0.05.
TOLERANCE = 0.02
# Pixels of this text where the pictures were taken: with other fonts every word has another place.
SAMPLE_TEXT, SAMPLE_PX = "Throughput 385,800 tokens/s", 236.1
# A guard against tests that hang, not a criterion.
PATIENCE_S = 120.0
SHAPES = {
    "1440": (1440, 900, "light"),
    "1440-dark": (1440, 900, "dark"),
    "800": (800, 900, "light"),
    "400": (400, 860, "light"),
}


def require_fonts(browser: Any) -> None:
    measured = browser.execute_script(
        "const c = document.createElement('canvas').getContext('2d');"
        "c.font = `16px ${getComputedStyle(document.body).fontFamily}`; return c.measureText(arguments[0]).width",
        SAMPLE_TEXT,
    )
    if abs(measured - SAMPLE_PX) > 0.5:
        pytest.skip(f"other fonts than in the pictures: the sample is {measured:.1f} pixels wide, not {SAMPLE_PX}")


def take(browser: Any, width: int, height: int, scheme: str, drawn: str = "figure svg") -> Image.Image:
    """The first screen, a quarter as large: what a person sees at a glance, not how a font draws its letters.

    drawn: the selector of what is drawn anew in a new width.
    """
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": features})
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        widest = "return Math.max(0, ...[...document.querySelectorAll(arguments[0])].map(s => s.clientWidth))"
        end = time.monotonic() + PATIENCE_S
        while not 0 < browser.execute_script(widest, drawn) <= width:
            assert time.monotonic() < end, "nothing was drawn"
            time.sleep(0.05)
        time.sleep(0.2)  # the chart is redrawn in its new width
        image = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return image.resize((width // 4, height // 4), Image.Resampling.BOX)


def difference(first: Image.Image, second: Image.Image) -> float:
    """The share of points that look different, after a blur of a few letters."""
    if first.size != second.size:
        return 1.0
    soft = [image.filter(ImageFilter.BoxBlur(2)) for image in (first, second)]
    red, green, blue = ImageChops.difference(*soft).split()
    most = ImageChops.lighter(ImageChops.lighter(red, green), blue)
    return sum(most.histogram()[12:]) / (first.width * first.height)


def golden(name: str) -> Image.Image:
    return Image.open(PICTURED / name).convert("RGB")


def check(now: Image.Image, name: str, folder: Path) -> None:
    """PACELINE_UPDATE_GOLDEN=1 stores what is shown now; look at it before you commit it."""
    if os.environ.get("PACELINE_UPDATE_GOLDEN") == "1":
        now.quantize(128).save(PICTURED / name, optimize=True)
    now.save(folder / name)
    found = difference(now, golden(name))
    assert found <= TOLERANCE, f"{found:.1%} of {name} looks different: compare {folder / name} with {PICTURED / name}"
