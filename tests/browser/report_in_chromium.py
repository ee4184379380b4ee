"""The report page in headless Chromium: it loads without network, complains of nothing, and draws every figure.

Not part of `make test`: run it with `make test-report`, which sees to the browser. Leaves report.png beside the page in
runs/test-report for a look.
"""

import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from rhyme_verl.commands.report.page import SECTIONS, build
from rhyme_verl.commands.report.run import read_run
from tests.helpers.runs import make_run

OUT = Path(__file__).parents[2] / "runs/test-report"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
WIDTH = 1240
DRAWN = """
return [...document.querySelectorAll(".plotly-graph-div")].map(div => {
  const box = div.querySelector(".main-svg").getBoundingClientRect();
  const marks = div.querySelectorAll(".trace, .hm image, .gl-canvas, .point, .bars path").length;
  return {width: box.width, height: box.height, marks: marks};
});
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = Options()
    options.binary_location = shutil.which("chromium")
    for flag in (*FLAGS, f"--window-size={WIDTH},1000", f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    runs = [
        read_run(make_run(root / "histopipe", num_steps=8)),
        read_run(make_run(root / "baseline", seed=1, num_steps=8, num_replicas=4)),
    ]
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "report.html"
    path.write_text(build(runs), encoding="utf-8")
    return path


def test_the_page_loads_and_draws_everything(browser, page):
    browser.get(page.as_uri())
    WebDriverWait(browser, 30).until(
        lambda driver: driver.execute_script(
            "return document.querySelectorAll('.plotly-graph-div .main-svg').length >= arguments[0]", len(SECTIONS)
        )
    )
    assert browser.get_log("browser") == []
    drawn = browser.execute_script(DRAWN)
    assert len(drawn) == len(SECTIONS) + 1, "a timeline for each run"
    for figure in drawn:
        assert figure["width"] > 0.7 * WIDTH and figure["height"] > 150 and figure["marks"] > 0
    height = browser.execute_script("return document.documentElement.scrollHeight")
    browser.set_window_size(WIDTH, height)
    browser.save_screenshot(str(OUT / "report.png"))
    assert (OUT / "report.png").stat().st_size > 50_000


def test_nothing_is_fetched(browser, page):
    browser.get(page.as_uri())
    requested = [
        entry["message"] for entry in browser.get_log("performance") if 'Network.requestWillBeSent"' in entry["message"]
    ]
    assert not any('"url":"http' in message for message in requested)


def test_a_narrow_window_has_no_sideways_scrolling(browser, page):
    browser.set_window_size(600, 900)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
