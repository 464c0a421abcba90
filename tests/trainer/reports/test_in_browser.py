"""The pages of runs and of sweeps in a real browser, where one is installed: drawn, sorted, searched, read, not obeyed.

All pages are loaded as they are, content policy and all, in frames of one page that drives them (in_browser.js) and
writes down what it sees; one start of the browser, half a second of processor time.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.run_folder import HOSTILE, make_run, make_study
from trainer import report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = Path(__file__).with_name("in_browser.js")
EVIL = "out of memory </script><script>document.title='owned'</script> <img src=x onerror=alert(1)> on device 0"
READABLE = 4.5
"""The least contrast of text by WCAG 2, level AA."""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """What the driver saw, and what stands on the console."""
    folder = tmp_path_factory.mktemp("pages")
    one, other = make_run(folder / "one"), make_run(folder / "another-run-with-a-long-name", lr=0.01)
    pages = {
        "run": report.write_report([one], folder / "run.html").as_uri(),
        "two": report.write_report([one, other], folder / "two.html").as_uri(),
        "sweep": report.write_report([make_study(folder / "sweep", EVIL)], folder / "sweep.html").as_uri(),
    }
    driver = folder / "driver.html"
    script = f"const PAGES = {json.dumps(pages)};\n{DRIVER.read_text(encoding='utf-8')}"
    driver.write_text(f'<meta charset="utf-8"><pre id="seen"></pre><script>{script}</script>', encoding="utf-8")
    words = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--allow-file-access-from-files",
        "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,9000", "--virtual-time-budget=60000", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run([str(BROWSER), *words, driver.as_uri()], capture_output=True, text=True, timeout=120)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search('(?s)<pre id="seen">(.+?)</pre>', done.stdout)
    assert found, f"the driver did not come to its end: {console or done.stderr[-2000:]}"
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    return seen, console


@pytest.fixture
def seen(browser: tuple[dict[str, Any], list[str]]) -> dict[str, Any]:
    return browser[0]


def test_no_page_complains(browser: tuple[dict[str, Any], list[str]]) -> None:
    assert browser[1] == []


def test_curves_bars_and_comparisons_are_drawn(seen: dict[str, Any]) -> None:
    run, two = seen["run"], seen["two"]
    assert run["tabs"] == ["Overview", "All metrics", "Samples", "Configuration"]
    charts = run["charts"]
    assert charts["Reward in training, mean over the samples of a step"] == 1
    assert charts["Validation, acc mean@1"] == 1
    assert charts["Time of a step by stage"] == 2 * 4  # gen and the rest, in each of four steps
    assert run["linesWhenSmooth"] == 2 * 2
    assert run["legends"] == ["step 3"] * 3 and run["firstStepAfterEscape"] == ""  # the keys move and zoom all charts
    assert run["cursors"] >= 2 and run["pointsFrom3"] == [2, 2, 2]
    assert two["charts"] == 2 * 2 and two["heads"][1:] == ["one", "another-run-with-a-long-name"]
    assert run["metric"] == [["critic/score/mean"], 2] and (run["ownOptions"], run["allOptions"]) == (3, 5)


def test_samples_are_listed_sorted_and_chosen(seen: dict[str, Any]) -> None:
    run = seen["run"]
    assert run["rows"] == 13 and run["byStep"] == [str(step) for step in (4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 0)]
    assert run["byScore"][0] == ["score descending"]
    assert run["byScore"][1] == ["1"] * 6 + ["0"] * 3 + ["late"] * 4
    assert run["byScoreAgain"] == ["0"] * 3 + ["1"] * 6 + ["late"] * 4
    assert run["worst"] == ["0"] * 3 + ["1"] * 6 and run["failed"] == ["late"] * 4 and run["changed"] == ["+1"]


def test_what_a_model_or_a_program_wrote_stays_text(seen: dict[str, Any]) -> None:
    hostile = seen["run"]["hostile"]
    assert hostile["rows"] == 1 and HOSTILE in hostile["texts"] and hostile["marks"] == ["document.title"]
    assert hostile["title"] == "one" and seen["run"]["foreign"] == 0
    assert EVIL in seen["sweep"]["failure"] and seen["sweep"]["foreign"] == 0 and "Sweep" in seen["sweep"]["title"]


def test_trials_are_sorted_and_marked_everywhere(seen: dict[str, Any]) -> None:
    sweep = seen["sweep"]
    assert sweep["tabs"][:2] == ["Sweep", "Best runs"] and sweep["charts"] == ["val-core/sums/acc/mean@1", "lr", "kind"]
    assert sweep["trials"] == [["0", "1", "2", "3"], ["1", "0", "2", "3"], ["2", "0", "1", "3"]]
    assert sweep["marked"] == ["2"] and sweep["faint"][0] == [0.12, 0.12, 0.9]
    assert sweep["runs"][1:] == ["0001/run", "0000/run"], "the best comes first"


def test_nothing_is_wider_than_the_screen(seen: dict[str, Any]) -> None:
    assert set(seen["run"]["tooWide"].values()) == {0} and seen["sweep"]["tooWide"] == seen["two"]["tooWide"] == 0
    assert {name: width for name, width in seen["phone"].items() if width} == {}


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_text_can_be_read_in_light_and_dark(seen: dict[str, Any], name: str) -> None:
    colours = seen[name]["colours"]
    assert {colours["first"][0], colours["second"][0]} == {"rgb(247, 248, 250)", "rgb(20, 23, 27)"}
    for _, (contrast, where) in colours.values():
        assert contrast >= READABLE, where
