"""The pages of runs and of sweeps in a real browser, where one is installed: drawn, sorted, searched, read, not obeyed.

All pages are loaded as they are, content policy and all, in frames of one page that drives them (in_browser.js) and
writes down what it sees; one start of the browser, half a second of processor time.
"""

from __future__ import annotations

import html
import json
import os
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

# `.ci/run` installs one, so that this test is never skipped there
pytestmark = pytest.mark.skipif(
    BROWSER is None and "CI" not in os.environ, reason="no chromium, chromium-browser or google-chrome on PATH"
)


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


@pytest.mark.slow
def test_the_pages_are_drawn_sorted_searched_and_read_and_what_a_model_wrote_stays_text(
    browser: tuple[dict[str, Any], list[str]],
) -> None:
    seen, console = browser
    assert console == []
    run, two, sweep = seen["run"], seen["two"], seen["sweep"]
    assert run["tabs"] == ["Overview", "All metrics", "Samples", "Configuration"]
    assert run["charts"]["Reward in training, mean over the samples of a step"] == 1
    assert run["charts"]["Validation, acc mean@1"] == 1
    assert run["charts"]["Time of a step by stage, one"] == 2 * 4  # gen and the rest, in each of four steps
    assert run["ticks"]["steps"] == ["1", "2", "3", "4"]
    assert run["ticks"]["rate"] == ["0", "0.2e−6", "0.4e−6", "0.6e−6", "0.8e−6", "1e−6"]
    assert run["linesWhenSmooth"] == 5 and run["metric"] == 2 and (run["ownOptions"], run["allOptions"]) == (3, 5)
    assert two["charts"] == 2 * 3 and two["heads"][1:] == ["one", "another-run-with-a-long-name"]
    assert run["byStep"] == [str(step) for step in (4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 0)]
    assert run["best"] == ["1"] * 6 + ["0"] * 3 and run["worst"] == ["0"] * 3 + ["1"] * 6
    assert run["failed"] == ["timed out"] * 4 and run["changed"] == ["1"]
    hostile = run["hostile"]
    assert hostile["rows"] == 2 and HOSTILE in hostile["texts"] and hostile["marks"] == ["document.title"]
    tree = run["tree"]
    assert tree["rows"] == 1 and tree["root"] == ["6 requests, reward timed out"]
    assert tree["nesting"] == [1, 1, 2, 2, 2, 1]
    assert [title.split()[0] for title in tree["titles"]] == ["#0", "#1", "#2", "#5", "#3", "#4"]
    assert "#2 continues #1 1,200 prompt + 34 sampled tokens, weights 3 to 4, row 0, stop" in tree["titles"][2]
    assert tree["open"] == ["#1"] and tree["marks"] == ["sunny"]
    assert tree["reasons"] == [f", discarded: retry {HOSTILE}"]
    assert f"sunny {HOSTILE}" in tree["texts"] and HOSTILE in tree["texts"]
    assert hostile["title"] == "one" and run["foreign"] == sweep["foreign"] == 0 and EVIL in sweep["failure"]
    assert sweep["tabs"][:2] == ["Sweep", "Best runs"] and sweep["charts"] == ["val-core/sums/acc/mean@1", "lr", "kind"]
    assert sweep["legend"] == ["trial 0", "trial 1", "trial 2"] and sweep["steps"] == ["0", "1", "2", "3", "4"]
    assert sweep["trials"] == ["1", "0", "2", "3"] and sweep["runs"][1:] == ["0001/seed-1", "0000/seed-1"]
    assert {name: width for name, width in seen["widths"].items() if width} == {}
    for contrast, where in [*run["colours"], *sweep["colours"]]:  # light and dark
        assert contrast >= READABLE, where
