"""What report.html takes in a real browser: its weight, the time until it can be used, and how fast a filter answers.

Run `python benchmarks/page.py [RUNS ...]` (default: 24 504); it makes that many up, of 2 ranks x 50 steps, writes the
page and opens it in Debian's chromium without a window. It prints one JSON line for each. Needs chromium and
chromedriver. Interactive: the charts of the first screen are drawn and every control answers. Settled: the end of the
last task that blocks the browser for 50 ms or more, when all other charts are drawn too. Nothing here passes or fails.
"""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import write_store

from paceline.analysis.report import build
from paceline.report.exporters import html
from paceline.results.launches import read_experiment

STEPS, RANKS, OPENINGS = 50, 2, 3
# No task that blocks for this long after the last one: the page is at rest.
QUIET_S = 1.0
WATCH = """
window.busyUntil = 0;
new PerformanceObserver(list => {
  for (const task of list.getEntries()) busyUntil = Math.max(busyUntil, task.startTime + task.duration);
}).observe({type: "longtask", buffered: true});
"""
TIMES = """
const paint = performance.getEntriesByName("first-contentful-paint")[0];
const page = performance.getEntriesByType("navigation")[0];
const drawn = performance.getEntriesByName("paceline-drawn")[0];
return {
  paint: paint ? paint.startTime : null, parsed: page.domContentLoadedEventEnd, busy: window.busyUntil,
  drawn: drawn ? drawn.startTime : null,
};
"""
FILTER = """
const done = arguments[0], tick = document.querySelector('.filter input[type="checkbox"]');
const began = performance.now();
tick.click();
requestAnimationFrame(() => setTimeout(() => { const took = performance.now() - began; tick.click(); done(took); }, 0));
"""


def measure(runs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder, runs, STEPS, RANKS)
        records, skipped = read_experiment(folder / "many")
        began = time.perf_counter()
        (page,) = html.export(build(records, title="many", skipped=skipped), folder)
        written_s = time.perf_counter() - began
        content = page.read_bytes()
        found = {
            "runs": runs,
            "build_s": round(written_s, 1),
            "page_mb": round(len(content) / 1e6, 2),
            "compressed_mb": round(len(gzip.compress(content)) / 1e6, 2),
        }
        return found | opened(page)


def opened(page: Path) -> dict[str, Any]:
    """Medians over some openings, in milliseconds after the start of the navigation."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,900"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        times = [_open(browser, page) for _ in range(OPENINGS)]
        nodes = browser.execute_script("return document.querySelectorAll('*').length")
    finally:
        browser.quit()
    return {f"{name}_ms": round(statistics.median(each[name] for each in times)) for name in times[0]} | {
        "elements": nodes
    }


def _open(browser: Any, page: Path) -> dict[str, float]:
    browser.get("about:blank")
    browser.get(page.as_uri())
    while True:
        found = browser.execute_script(TIMES)
        now = browser.execute_script("return performance.now()")
        if found["drawn"] is not None and now - max(found["busy"], found["drawn"]) > 1000 * QUIET_S:
            break
        time.sleep(0.1)
    return {
        "first_paint": found["paint"] or found["parsed"],
        "interactive": found["drawn"],
        "settled": max(found["busy"], found["drawn"]),
        "filter": browser.execute_async_script(FILTER),
    }


if __name__ == "__main__":
    for count in map(int, sys.argv[1:] or (24, 504)):
        print(json.dumps(measure(count)), flush=True)
