"""`paceline ui` in a real browser: measured runs, a run in progress on two nodes, and hostile names."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from testbed import pictures

from paceline.campaign.ui.library import Library
from paceline.campaign.ui.routes import App
from paceline.campaign.ui.server import serving
from paceline.launchers.node.log_transport import Receiver
from paceline.results import campaign_file, store
from paceline.results.records import GaugeSample

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

KEPT = Path(__file__).parents[2] / "docs" / "measured"
AXE = Path(__file__).parent / "axe" / "axe.min.js"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
EVIL = "<img src=x onerror=document.title='owned'>"
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, make_spec: Callable[..., Any]) -> Path:
    """A run in progress on two nodes with two GPUs each, beside the same measured runs under two names."""
    root = tmp_path_factory.mktemp("ui") / "results"
    root.mkdir()
    with tarfile.open(KEPT / "h200" / "runs.tar.gz") as archive:
        archive.extractall(root, filter="data")
    (measured,) = root.iterdir()
    measured.rename(root / "before")
    shutil.copytree(root / "before", root / EVIL)
    spec = make_spec(experiment="now", nodes=2, steps=50, device="cuda", precision="bf16/fp32")
    folder = store.create(root, spec)
    campaign_file.write_plan(folder.parent, [spec])
    for rank in range(4):
        store.ProgressFile(folder, rank).mark(2, "forward")
    for rank in (0, 2):
        write_reading(folder, rank, 0.91)
    (folder / "log.txt").write_text(f"[rank 0] {EVIL}\n[rank 3] the last rank\n")
    return folder


def write_reading(folder: Path, rank: int, busy: float) -> None:
    host = EVIL if rank else "node-a"
    at = time.time()
    samples = [GaugeSample(rank=rank, host=host, at_s=at, cpu_ratio=0.2)]
    samples += [
        GaugeSample(rank=rank, host=host, at_s=at, device=i, utilisation_ratio=busy, power_w=600.0, temperature_c=60.0)
        for i in range(2)
    ]
    with (folder / f"samples-gauges-{rank}.jsonl").open("a") as file:
        file.write("".join(map(store.sample_line, samples)))


@pytest.fixture(scope="module")
def url(run_dir: Path) -> Iterator[str]:
    with serving(App(Library(run_dir.parent.parent)), "127.0.0.1:0") as address:
        yield address.rstrip("/")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """Whatever a test does, the browser must have nothing to complain about, and no name becomes markup."""
    yield chromium
    assert [entry["message"] for entry in chromium.get_log("browser")] == []
    assert chromium.title != "owned"


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("the page did not come to it")


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))


def violations(browser: Any) -> list[str]:
    """What axe-core finds: labels, roles, contrast."""
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run(document).then(arguments[0])")
    return [f"{v['id']}: {v['nodes'][0]['html'][:200]}" for v in found["violations"]]


def width_fits(browser: Any) -> bool:
    return bool(browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"))


def test_campaigns_answer_and_two_ticked_are_compared(browser: Any, url: str) -> None:
    browser.get(url)
    assert browser.title == "results - Paceline"
    answers = "return [...document.querySelectorAll('.answer')].map(e => e.textContent)"
    # While a campaign runs, answers are shown only if they are known already; the report has the others.
    assert ["open its report" in answer for answer in browser.execute_script(answers)] == [False, True, True]
    for name in ("before", quote(EVIL, safe="")):
        with urllib.request.urlopen(f"{url}/campaign/{name}/headline", timeout=PATIENCE_S) as answer:
            assert b"faster than fsdp2" in answer.read()
    browser.refresh()
    assert ["faster than fsdp2" in answer for answer in browser.execute_script(answers)] == [False, True, True]
    assert violations(browser) == []
    compare = browser.find_element("css selector", "#compare")
    assert not compare.is_enabled()
    for tick in browser.find_elements("css selector", 'input[name="tick"]')[1:]:
        tick.click()
    assert compare.is_enabled()
    compare.click()
    wait_for(lambda: text(browser, ".headline"))
    assert "against" in browser.title
    assert wait_for(lambda: browser.find_elements("css selector", ".lead figure svg"))
    browser.find_element("css selector", ".bar .home").click()
    wait_for(lambda: browser.title == "results - Paceline")


def test_runs_are_found_while_typing(browser: Any, url: str) -> None:
    browser.get(f"{url}/runs")
    count = "return document.querySelectorAll('#rows tbody tr').length"
    every = browser.execute_script(count)
    assert every == 53
    browser.find_element("css selector", 'input[type="search"]').send_keys("fsdp2")
    found = wait_for(lambda: (n := browser.execute_script(count)) < every and n)
    assert 0 < found < every
    assert "q=fsdp2" in browser.current_url
    assert width_fits(browser)
    browser.find_element("css selector", "#rows th:nth-child(2) button.sort").click()
    assert browser.find_element("css selector", "#rows th:nth-child(2)").get_attribute("aria-sort") == "ascending"


def test_the_live_view_shows_nodes_and_follows_them(browser: Any, url: str, run_dir: Path) -> None:
    browser.get(f"{url}/campaign/now/live")
    wait_for(lambda: "91" in text(browser, "#summary"))
    assert "step 3 of 50" in text(browser, "#now")
    assert "4 GPUs on 2 nodes" in text(browser, "#tile-gpus")
    assert violations(browser) == []
    for rank in (0, 2):
        write_reading(run_dir, rank, 0.55)
    wait_for(lambda: "median 55 %" in text(browser, "#summary"))
    drawn = "const m = document.getElementById('map'); return [...m.getContext('2d').getImageData(20, 25, 1, 1).data]"
    assert browser.execute_script(drawn)[3] == 255
    browser.find_element("css selector", "#map").send_keys("\ue014\ue014")  # arrow right, twice
    assert text(browser, "#node h3") == EVIL
    assert "ranks 2 to 3" in text(browser, "#node p")
    assert len(browser.find_elements("css selector", "#node tbody tr")) == 2
    wait_for(lambda: "the last rank" in text(browser, ".log pre"))
    assert EVIL in text(browser, ".log pre")
    field = browser.find_element("css selector", '.log [name="rank"]')
    field.send_keys("3", "\ue006")
    wait_for(lambda: text(browser, ".log pre") == "[rank 3] the last rank")
    with (run_dir / "log.txt").open("a") as log:
        log.write("[rank 0] unseen\n[rank 3] one more\n")
    wait_for(lambda: text(browser, ".log pre").endswith("one more"))
    assert "unseen" not in text(browser, ".log pre")


# --- a picture of the live view ---

NODES, GPUS, ROUNDS = 16, 8, 60


@pytest.fixture(scope="module")
def live_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The first minute of the agents of `benchmarks/ui.py` by their own clock, sent as log lines of nodes that share
    no disk."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        synthetic = importlib.import_module("ui")
    finally:
        sys.path.pop(0)
    root, disks = tmp_path_factory.mktemp("live") / "results", tmp_path_factory.mktemp("disks")
    spec = synthetic.make_spec(NODES, GPUS)
    folder = store.create(root, spec)
    campaign_file.write_plan(folder.parent, [spec])
    agents, receiver = [synthetic.Agent(disks / str(node), spec, node) for node in range(NODES)], Receiver(folder)
    for second in range(ROUNDS):
        for agent in agents:
            agent.second(1.8e9 + second, int(second / synthetic.STEP_S))
    for line in (line for agent in agents for line in agent.sender.changes()):
        receiver.feed(line)
    (folder / "log.txt").write_text("[rank 0] step 73\n")
    with (
        pytest.MonkeyPatch.context() as patch,
        serving(App(Library(root)), "127.0.0.1:0") as address,
    ):
        # The straggler is named after 20 looks.
        patch.setattr("paceline.campaign.ui.live.INTERVAL_S", 0.05)
        yield f"{address}campaign/{spec.experiment}/live"


@pytest.mark.parametrize("shape", pictures.SHAPES)
def test_the_live_view_looks_as_it_did(shape: str, browser: Any, live_url: str, tmp_path: Path) -> None:
    if browser.current_url != live_url:
        browser.get(live_url)
        wait_for(lambda: "rank 43 (gpu-005) is last in 60 of 60 looks" in text(browser, "#alerts"))
    pictures.require_fonts(browser)
    pictures.check(pictures.take(browser, *pictures.SHAPES[shape], drawn="#map"), f"live-{shape}.png", tmp_path)


@pytest.mark.parametrize("path", ["/", "/runs", "/campaign/now/live"])
def test_pages_fit_a_phone(browser: Any, url: str, path: str) -> None:
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.get(url + path)
        assert width_fits(browser)
        if folder := os.environ.get("PACELINE_SCREENSHOTS"):
            browser.save_screenshot(f"{folder}/ui{path.replace('/', '-')}.png")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
