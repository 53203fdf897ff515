"""report.html in a real browser: measured runs, opened from disk, with every name a hostile one could be."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated_serving as made
from testbed import pictures

from paceline.analysis.compare import folders
from paceline.analysis.compare import history as over_time
from paceline.analysis.findings import Report
from paceline.analysis.report import build
from paceline.report.exporters import html
from paceline.report.exporters._other_pages import compare_page, history_page
from paceline.results.launches import read_experiment

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

KEPT = Path(__file__).parents[2] / "docs" / "measured"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
AXE = Path(__file__).parent / "axe" / "axe.min.js"
EVIL = "<script>document.title='owned'</script>"

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromedriver (Debian: chromium, chromium-driver)"
)


def kept(name: str, folder: Path) -> Report:
    """The report of runs that are kept as they were measured."""
    with tarfile.open(KEPT / name / "runs.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    (experiment,) = folder.iterdir()
    records, skipped = read_experiment(experiment)
    return build(records, title=name, skipped=skipped)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return kept("h200", tmp_path_factory.mktemp("measured"))


def hostile(report: Report) -> Report:
    """One model's name is a script, wherever it is told."""

    def named(value: Any) -> Any:
        ours = value.axes.get("model") == "llama-1b"
        return dataclasses.replace(value, axes={**value.axes, "model": EVIL}) if ours else value

    return dataclasses.replace(
        report,
        title=EVIL,
        runs=tuple(map(named, report.runs)),
        measurements=tuple(map(named, report.measurements)),
    )


@pytest.fixture(scope="module")
def page(measured: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (path,) = html.export(hostile(measured), tmp_path_factory.mktemp("page"))
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    started.set_script_timeout(120)
    yield started
    started.quit()


def load(browser: Any, page: Path) -> None:
    """The page as a reader first sees it."""
    media(browser, "screen", "light")
    browser.get(page.as_uri())
    browser.execute_script("try { localStorage.clear() } catch {}")
    drawn = "f => f.querySelector('svg') || !f.querySelector('.plot').clientWidth"
    wait_for(lambda: browser.execute_script(f"return [...document.querySelectorAll('figure')].every({drawn})"))


@pytest.fixture
def opened(chromium: Any, page: Path) -> Iterator[Any]:
    """Whatever a test does, the browser must have nothing to complain about."""
    load(chromium, page)
    yield chromium
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


@pytest.fixture
def looked_at(chromium: Any, page: Path) -> Iterator[Any]:
    """For tests that do not mind what the others did to the page: it is loaded once for those that follow each
    other. Those that change its width come last, because charts are redrawn then."""
    if not chromium.execute_script("return window.shared"):
        load(chromium, page)
        chromium.execute_script("window.shared = true")
    yield chromium
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


@contextlib.contextmanager
def sized(browser: Any, width: int, height: int = 900) -> Iterator[None]:
    """The page in a window of this size."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def media(browser: Any, kind: str, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": features})


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + pictures.PATIENCE_S
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("the page did not come to it")


def all_of(browser: Any, selector: str) -> list[Any]:
    return list(browser.find_elements("css selector", selector))


def shown(browser: Any, selector: str) -> list[Any]:
    return [element for element in all_of(browser, selector) if element.is_displayed()]


def click(browser: Any, element: Any) -> None:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def choose(browser: Any, axis: str, value: str) -> None:
    tick = f'document.querySelector(\'.filter input[name="{axis}"][value="{value}"]\')'
    browser.execute_script(f"{tick}.closest('details').open = true")
    browser.execute_script(f"return {tick}").click()


def bars(browser: Any, chart: str) -> int:
    return len(all_of(browser, f'figure[data-chart="{chart}"] svg g[aria-label="rect"] rect'))


def test_the_keyboard_reaches_the_marks(looked_at: Any) -> None:
    svg = looked_at.find_element("css selector", 'figure[data-chart="throughput"] svg')
    looked_at.execute_script("arguments[0].focus()", svg)
    svg.send_keys("\ue014\ue014")  # arrow right, twice
    assert "fsdp2" in looked_at.find_element("id", "tip").text


def test_every_chart_is_drawn(looked_at: Any) -> None:
    names = [figure.get_attribute("data-chart") for figure in all_of(looked_at, "figure")]
    assert names == [
        "pareto",
        "throughput",
        "phases",
        "memory",
        "host_to_device",
        "loss",
        "cost",
        "step_time",
        "gauges",
    ]
    assert bars(looked_at, "throughput") == 8
    text = looked_at.find_element("css selector", 'figure[data-chart="throughput"]').text
    assert "383,620" in text
    assert looked_at.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_a_hostile_name_stays_text(looked_at: Any) -> None:
    assert looked_at.execute_script("return document.title") == f"{EVIL}: Paceline report"
    assert EVIL in looked_at.find_element("tag name", "h1").text
    assert EVIL in looked_at.find_element("css selector", 'figure[data-chart="throughput"]').text.replace("\n", " ")


def test_a_filter_narrows_tables_charts_and_cells(looked_at: Any) -> None:
    click(looked_at, looked_at.find_element("link text", "Every cell"))
    wait_for(lambda: shown(looked_at, "details.cell"))
    rows, panels = len(shown(looked_at, "#ranking tbody tr")), len(shown(looked_at, "details.cell"))
    choose(looked_at, "strategy", "fsdp2")
    assert (rows, panels) == (8, 8)
    assert len(shown(looked_at, "#ranking tbody tr")) == 1
    assert len(shown(looked_at, "#ranking .block")) == 1, "a group without a row has no heading either"
    assert len(shown(looked_at, "details.cell")) == 1
    wait_for(lambda: bars(looked_at, "throughput") == 1)
    assert looked_at.find_element("id", "count").text == "1 of 8 cells"
    looked_at.find_element("id", "reset").click()
    assert len(shown(looked_at, "#ranking tbody tr")) == 8
    wait_for(lambda: bars(looked_at, "throughput") == 8)


def test_what_matches_nothing_is_hidden_not_broken(looked_at: Any) -> None:
    choose(looked_at, "strategy", "fsdp2")
    choose(looked_at, "compile", "on")
    assert shown(looked_at, "figure") == []
    assert looked_at.find_element("id", "count").text == "0 of 8 cells"
    looked_at.find_element("id", "reset").click()
    wait_for(lambda: bars(looked_at, "throughput") == 8)


def test_a_mark_shows_its_value_interval_samples_and_runs(looked_at: Any) -> None:
    svg = looked_at.find_element("css selector", 'figure[data-chart="throughput"] svg')
    looked_at.execute_script("arguments[0].scrollIntoView({block: 'center'})", svg)
    x, y = looked_at.execute_script(
        "const b = arguments[0].querySelector('g[aria-label=rect] rect').getBoundingClientRect();"
        "return [Math.round(b.left + 20), Math.round(b.top + 8)]",
        svg,
    )
    action = webdriver.ActionChains(looked_at).w3c_actions
    action.pointer_action.move_to_location(x, y)
    action.perform()
    tip = wait_for(lambda: shown(looked_at, "#tip"))[0].text
    for words in (
        "ddp",
        "383,620 [383,110, 384,130] tokens/s",
        "75 samples of 3 launches",
        "runs ddp-gpt2-124m-1x-r0-",
    ):
        assert words in tip


def test_a_table_is_copied_as_markdown(looked_at: Any) -> None:
    looked_at.execute_script("navigator.clipboard.writeText = async text => { window.copied = text; };")
    click(looked_at, looked_at.find_element("css selector", "#ranking .table-tools button"))
    copied = wait_for(lambda: looked_at.execute_script("return window.copied"))
    lines = copied.splitlines()
    assert lines[0].startswith("| # | strategy | tokens/s | vs best |")
    assert lines[1].startswith("| ---: | --- | ---: | --- |")
    assert "| 383,620 [383,110, 384,130] |" in lines[2]
    assert len(lines) == 2 + 5


def test_a_row_can_be_picked_as_the_baseline_of_all_ratios(looked_at: Any) -> None:
    pick = looked_at.find_element("css selector", '#ranking .pick[aria-label="Baseline: zero:stage=1"]')
    pick.send_keys("\ue007")  # return: the keyboard can do it too
    head = words(looked_at, "#ranking th:nth-child(4)")
    column = [
        cell.text for cell in all_of(looked_at, "#ranking table")[0].find_elements("css selector", "td:nth-child(4)")
    ]
    assert head == "vs zero:stage=1"
    assert column[2] == "baseline"
    assert "1.028x [1.024, 1.033]" in column[0], "ddp over it; it over ddp is 0.973x [0.968, 0.977]"
    pick.send_keys("\ue007")
    assert words(looked_at, "#ranking th:nth-child(4)") == "vs best"


def test_a_row_leads_to_its_cell_with_command_and_experiment_to_copy(looked_at: Any) -> None:
    link = looked_at.find_element("link text", "fsdp2")
    click(looked_at, link)
    panel = wait_for(lambda: shown(looked_at, "details.cell[open]"))[0]
    assert "paceline run fsdp2-gpt2-124m-1x-" in panel.text
    assert "strategy: fsdp2" in panel.text
    copies = [b for b in panel.find_elements("css selector", ".recipe button") if b.text == "Copy"]
    assert len(copies) == 2
    click(looked_at, copies[0])
    wait_for(lambda: copies[0].text == "Copied")


def test_data_and_image_of_a_chart_are_files(looked_at: Any, tmp_path: Path) -> None:
    looked_at.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    for button in all_of(looked_at, 'figure[data-chart="throughput"] .tools button'):
        click(looked_at, button)

    def text_of_tools() -> str:
        return words(looked_at, 'figure[data-chart="throughput"] .tools')

    wait_for(lambda: {"throughput.csv", "throughput.svg"} <= {path.name for path in tmp_path.iterdir()})
    lines = (tmp_path / "throughput.csv").read_text().splitlines()
    assert len(lines) == 1 + 8
    assert '"value (tokens/s)"' in lines[0]
    wait_for(lambda: (tmp_path / "throughput.png").exists() or "Copied" in text_of_tools())
    image = (tmp_path / "throughput.svg").read_text()
    assert image.startswith("<svg")
    assert "var(--" not in image, "colours are written out: the file has left the page"


def test_a_table_is_sorted_by_its_numbers_both_ways(looked_at: Any) -> None:
    def column() -> list[float]:
        cells = all_of(looked_at, "#ranking table:first-of-type")[0].find_elements("css selector", "td:nth-child(3)")
        return [float(cell.text.split()[0].replace(",", "")) for cell in cells]

    head = all_of(looked_at, "#ranking th:nth-child(3) button")[0]
    click(looked_at, head)
    first = column()
    click(looked_at, head)
    assert len(first) == 5
    assert first == sorted(first, reverse=True)
    assert column() == sorted(first)
    assert head.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"


def test_the_first_screen_holds_the_answer(looked_at: Any) -> None:
    """Headline, tiles, light, main chart and the first row of the ranking, without scrolling, at 1440 x 900."""
    size = {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    looked_at.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    looked_at.execute_script("scrollTo(0, 0)")
    try:
        assert (
            words(looked_at, ".headline")
            == "ddp is 1.0 % faster than fsdp2 on 1 GPU; inconclusive against zero:stage=3"
        )
        tiles = [tile.text.replace("\n", " ") for tile in all_of(looked_at, ".tile")]
        assert len(tiles) == 4
        assert tiles[0].startswith("Throughput 383,620 tokens/s [383,110, 384,130]")
        assert "5.7291 USD per billion tokens" in tiles[2]
        assert len(all_of(looked_at, ".tile svg.spark")) == 4
        assert words(looked_at, ".light summary").startswith("Trust: green. 24 of 24 runs certified")
        bottom = "return document.querySelector(arguments[0]).getBoundingClientRect().bottom"
        for selector in (".tiles", ".light", '.lead figure[data-chart="pareto"]', "#ranking tbody tr"):
            assert looked_at.execute_script(bottom, selector) <= 900, selector
        clipped = "[...document.querySelectorAll('#ranking .scroll')].some(e => e.scrollWidth > e.clientWidth)"
        assert not looked_at.execute_script(f"return {clipped}")
    finally:
        looked_at.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_tables_of_an_open_light_can_be_read(looked_at: Any) -> None:
    """Beside the chart a cell's name would be one letter per line."""
    with sized(looked_at, 1440):
        light = looked_at.find_element("css selector", ".light summary")
        light.click()
        narrow = "return Math.min(...[...document.querySelectorAll('.light td:first-child')].map(e => e.clientWidth))"
        assert looked_at.execute_script(narrow) >= 160
        chart = "return document.querySelector('.lead figure').clientWidth"
        wait_for(lambda: looked_at.execute_script(chart) > 1300)
        light.click()
        wait_for(lambda: looked_at.execute_script(chart) < 1000)


def test_a_phone_scrolls_in_one_direction_only(looked_at: Any) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    looked_at.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        wide = (
            "return Math.max(...[...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect().right))"
        )
        wait_for(lambda: looked_at.execute_script(wide) <= 390)
        assert looked_at.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        looked_at.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def words(browser: Any, selector: str) -> str:
    return str(browser.find_element("css selector", selector).text).replace("\n", " ")


def test_a_link_to_a_cell_opens_it_from_elsewhere(chromium: Any, page: Path) -> None:
    chromium.get(page.as_uri())
    cell = chromium.execute_script("return document.querySelector('details.cell').id")
    chromium.get("about:blank")
    chromium.get(f"{page.as_uri()}#{cell}")
    panel = wait_for(lambda: shown(chromium, "details.cell[open]"))[0]
    assert panel.get_attribute("id") == cell
    assert "Copy link" in panel.text


def barriers(browser: Any, scheme: str) -> list[str]:
    """What axe-core's rules of WCAG 2 A and AA find: names, roles, labels and contrast, with every section open."""
    media(browser, "screen", scheme)
    browser.execute_script("for (const d of document.querySelectorAll('details.part, details.light')) d.open = true")
    browser.execute_script(AXE.read_text(encoding="utf-8"))
    found: list[str] = browser.execute_async_script(
        "const done = arguments[0];"
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa']}).then(r => done(r.violations.map("
        "v => `${v.id}: ${v.nodes.length} x ${v.nodes[0].html.slice(0, 160)} ${v.nodes[0].failureSummary}`)))"
    )
    return found


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.exhaustive)])
def test_a_screen_reader_and_weak_eyes_can_use_it(opened: Any, scheme: str) -> None:
    assert barriers(opened, scheme) == []


def test_the_theme_follows_the_system_and_the_button(opened: Any) -> None:
    def ground() -> str:
        return str(opened.execute_script("return getComputedStyle(document.body).backgroundColor"))

    assert ground() == "rgb(255, 255, 255)"
    media(opened, "screen", "dark")
    dark = wait_for(lambda: ground() != "rgb(255, 255, 255)" and ground())
    opened.find_element("id", "theme").click()
    assert ground() == "rgb(255, 255, 255)"
    opened.find_element("id", "theme").click()
    assert ground() == dark
    media(opened, "print", "dark")
    assert ground() == "rgb(255, 255, 255)", "paper is white"
    opened.execute_script("localStorage.clear()")


def test_without_javascript_the_tables_are_there_and_the_charts_are_named(chromium: Any, page: Path) -> None:
    chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chromium.get(page.as_uri())
        text = chromium.find_element("tag name", "main").text
    finally:
        chromium.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "383,620" in text
    assert "plots/" in text
    assert "Copy as Markdown" not in text


# --- compare and history ---


@pytest.fixture(scope="module")
def other_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one experiment against themselves 20 % slower under another driver, and over twelve days with that change
    after the sixth. The directories and the experiment have names that are scripts."""
    folder = tmp_path_factory.mktemp("others")
    with tarfile.open(KEPT / "h200" / "runs.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    records, _ = read_experiment(folder / "h200")

    def later(days: int, slower: float) -> list[Any]:
        changed = {"driver": "590.44.01"} if slower >= 1.2 else {}
        return [
            dataclasses.replace(
                record,
                machines=tuple({**machine, **changed} for machine in record.machines),
                started_at=record.started_at + 86400 * days,
                ended_at=record.ended_at + 86400 * days,
                path=f"/day-{days}/h200/{record.spec.run_id}",
                steps=tuple(dataclasses.replace(step, duration_s=step.duration_s * slower) for step in record.steps),
            )
            for record in records
        ]

    between = folders.compare_experiments(records, later(1, 1.2), (f"a/{EVIL}", f"b/{EVIL}"))
    launches = [record for day in range(12) for record in later(day, 1 + 0.002 * (day % 3) + (0.2 if day > 5 else 0))]
    judged = over_time.judge(launches)
    series = over_time.analyse(judged.windows, fewest=1, asked=judged.asked)
    pages = {
        "compare": compare_page(between, [f"skipped: {EVIL}"]),
        "history": history_page(f"History of {EVIL}", series, f"launches in {EVIL}", [f"skipped: {EVIL}"]),
    }
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in pages}


@pytest.fixture
def other(chromium: Any, other_pages: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Any]:
    media(chromium, "screen", "light")
    chromium.get(other_pages[request.param].as_uri())
    wait_for(lambda: len(all_of(chromium, "figure svg")) >= 1)
    yield chromium
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


@pytest.mark.parametrize("other", ["compare"], indirect=True)
def test_compared_directories_are_a_page(other: Any) -> None:
    """20 % more time per step is 16.7 % fewer tokens/s in every cell; launches of ZeRO-3 differ too much to show it."""
    tiles = [tile.text.split("\n")[:2] for tile in all_of(other, ".tile")]
    counts = [("Worse", 7), ("Better", 0), ("Equal", 8), ("Inconclusive", 1)]
    assert tiles == [[name, f"{n} of 16 comparisons"] for name, n in counts], "step time says the same"
    assert all(tile.text for tile in all_of(other, ".tile .interval")[:1]), "the largest change with its interval"
    assert "Differs in every cell: driver 580.159.04 -&gt; 590.44.01" in other.page_source
    assert "Equal: 8 rows" in [summary.text for summary in all_of(other, "section summary")]
    with sized(other, 1440):
        wide = "return Math.min(...[...document.querySelectorAll('.panels svg')].map(s => s.clientWidth))"
        wait_for(lambda: 600 < other.execute_script(wide) < 720)
        tops = (
            "return new Set([...document.querySelectorAll('.panels svg')].map(s => s.getBoundingClientRect().top)).size"
        )
        assert other.execute_script(tops) == 1, "both metrics beside each other, no empty column"
    assert "worse equal inconclusive" in chart_text(other, "changes")
    assert EVIL in other.find_element("tag name", "body").text
    assert other.execute_script("return document.title") == "script> against script>: Paceline report"
    svg = other.find_element("css selector", 'figure[data-chart="changes"] svg')
    other.execute_script("arguments[0].focus()", svg)
    svg.send_keys("\ue014")  # arrow right
    assert "gpt2-124m" in other.find_element("id", "tip").text


@pytest.mark.parametrize("other", ["history"], indirect=True)
def test_a_history_is_a_page_with_its_change(other: Any) -> None:
    text = other.find_element("tag name", "body").text
    assert EVIL in text
    assert words(other, ".headline").startswith("tokens/s of "), "words, not the name of a metric"
    assert "16.6 % lower since" in words(other, ".headline"), "1 / 1.2, less the spread between days"
    assert "(driver 580.159.04" in words(other, ".headline"), "and what changed with it"
    drawn = chart_text(other, "history_tokens_per_s")
    assert "16.6 % lower: driver" in drawn, "at the change in the chart, in as many lines as it needs"
    assert "580.159.04 ->" in drawn
    assert "NaN" not in text
    assert len(all_of(other, "figure svg")) >= 1


@pytest.mark.parametrize("other", ["compare", pytest.param("history", marks=pytest.mark.exhaustive)], indirect=True)
def test_the_other_pages_have_no_barriers_and_fit_a_phone(other: Any) -> None:
    assert barriers(other, "light") == []
    assert barriers(other, "dark") == []
    with sized(other, 390, 844):
        wait_for(lambda: other.execute_script("return document.documentElement.scrollWidth") == 390)


# --- pictures ---


MEASURED = {"fabric": "h200-fabric", "memory": "h200-memory", "finetune": "h200-finetune"}
PICTURES = [
    (page, shape) for page in ("training", "served", "compare", "history", *MEASURED) for shape in pictures.SHAPES
]
# Each width and scheme once, and each kind of page.
USUAL = {("training", "1440-dark"), ("training", "1440"), ("training", "400"), ("served", "1440"), ("compare", "1440")}


@pytest.fixture(scope="module")
def pictured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of this name; those of measured runs are made when they are asked for."""
    made: dict[str, Path] = {}

    def page(name: str) -> Path:
        if name in MEASURED and name not in made:
            folder = tmp_path_factory.mktemp(name)
            (made[name],) = html.export(kept(MEASURED[name], folder / "kept"), folder)
        if name in made:
            return made[name]
        if name in ("training", "served"):
            return Path(request.getfixturevalue("page" if name == "training" else "served_page"))
        return Path(request.getfixturevalue("other_pages")[name])

    return page


@pytest.mark.parametrize(
    ("which", "shape"),
    [pytest.param(*each, marks=[pytest.mark.exhaustive] * (each not in USUAL)) for each in PICTURES],
)
def test_the_first_screen_looks_as_it_did(
    which: str, shape: str, chromium: Any, pictured: Callable[[str], Path], tmp_path: Path
) -> None:
    if chromium.execute_script("return window.pictured") != which:
        chromium.get(pictured(which).as_uri())
        wait_for(lambda: all_of(chromium, "figure svg"))
        chromium.execute_script("window.pictured = arguments[0]", which)
    pictures.require_fonts(chromium)
    pictures.check(pictures.take(chromium, *pictures.SHAPES[shape]), f"{which}-{shape}.png", tmp_path)


def test_a_missing_chart_is_seen_in_a_picture(chromium: Any, page: Path) -> None:
    chromium.get(page.as_uri())
    wait_for(lambda: all_of(chromium, "figure svg"))
    pictures.require_fonts(chromium)
    chromium.execute_script("document.querySelector('.lead figure').style.visibility = 'hidden'")
    without = pictures.take(chromium, *pictures.SHAPES["1440"])
    assert pictures.difference(without, pictures.golden("training-1440.png")) > pictures.TOLERANCE


# --- a served model ---


@pytest.fixture(scope="module")
def served_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loads beside each other, one over a schedule that lost a node whose name is a script, and a sweep."""
    lost = (made.Replica("node-a"), made.Replica(EVIL, died_s=2.0))
    asked = {"scenario": "server", "rate_per_s": 25.0, "ttft_limit_s": 0.2, "tpot_limit_s": 0.04}
    late = made.record(made.asked(150, lost, rate_per_s=25), lost, **asked)
    records = [*made.closed_loops((1, 4, 16), requests=120), late, made.sweep((4.0, 32.0), requests=60)]
    (path,) = html.export(build(records, title="served"), tmp_path_factory.mktemp("served"))
    return path


@pytest.fixture
def served(chromium: Any, served_page: Path) -> Iterator[Any]:
    """Loaded once for the tests that follow each other; the one that changes its width comes last."""
    if not chromium.execute_script("return window.served"):
        media(chromium, "screen", "light")
        chromium.get(served_page.as_uri())
        wait_for(lambda: len(all_of(chromium, "#served figure svg")) >= 6)
        chromium.execute_script("window.served = true")
    yield chromium
    assert [entry["message"] for entry in chromium.get_log("browser")] == []


def chart_text(browser: Any, name: str) -> str:
    return str(browser.find_element("css selector", f'figure[data-chart="{name}"]').text).replace("\n", " ")


def test_a_served_model_is_drawn(served: Any) -> None:
    assert len(all_of(served, 'figure[data-chart="served_in_flight"] g[aria-label="area"] path')) >= 8
    assert "limit of server 200 ms" in chart_text(served, "served_curve")
    assert f"{EVIL} gone" in chart_text(served, "served_in_flight")
    assert "0 50 90 99" in chart_text(served, "served_distributions")
    assert "NaN" not in served.find_element("id", "served").text


def test_points_of_an_area_are_listed(served: Any) -> None:
    svg = served.find_element("css selector", 'figure[data-chart="served_in_flight"] svg')
    click(served, svg)
    svg.send_keys("\ue014")  # the right arrow
    assert " in flight at " in served.find_element("css selector", "#tip").text


def test_served_charts_fit_a_phone(served: Any) -> None:
    size = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    served.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        wait_for(
            lambda: (
                served.execute_script(
                    "return Math.max(...[...document.querySelectorAll('#served svg')].map(s => s.clientWidth))"
                )
                <= 390
            )
        )
        assert served.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        served.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_sizes_are_read_in_bytes(chromium: Any, pictured: Callable[[str], Path]) -> None:
    chromium.get(pictured("fabric").as_uri())
    wait_for(lambda: len(all_of(chromium, "#charts figure svg")) >= 8)
    text = chromium.find_element("id", "charts").text
    assert "KiB" in text
    assert "100M" in text, "bytes per second by their prefixes"
    assert "NaN" not in text
    shut = "return document.querySelectorAll('#machine > details').length"
    assert chromium.execute_script(shut) <= 10, "119 tables are behind one line"


# --- many runs ---


@pytest.mark.exhaustive
def test_504_runs_are_one_page_that_can_be_used(chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of `benchmarks/page.py`; how long it takes is measured there."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    importlib.import_module("report").write_store(tmp_path, 504, steps=12, ranks=2)
    records, skipped = read_experiment(tmp_path / "many")
    (path,) = html.export(build(records, title="many", skipped=skipped), tmp_path)
    assert path.stat().st_size < 5e6
    load(chromium, path)
    assert len(all_of(chromium, "details.cell")) == 105, "shuffled, of 5 repeats of each"
    assert len(shown(chromium, "#ranking tbody tr")) == 105
    choose(chromium, "strategy", "fsdp2")
    assert len(shown(chromium, "#ranking tbody tr")) == 21
    wait_for(lambda: chromium.find_element("id", "count").text == "21 of 105 cells")
    with sized(chromium, 400, 860):
        wait_for(lambda: chromium.execute_script("return document.documentElement.scrollWidth") == 400)
    assert [entry["message"] for entry in chromium.get_log("browser")] == []
