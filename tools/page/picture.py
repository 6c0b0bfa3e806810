"""Takes a picture of the page of a running run, with a real browser.

    PYTHONPATH=$(bash tools/page/setup.sh | tail -1) python -m tools.page.picture RUN_DIR FILE.png [--step 55]

RUN_DIR is the coordinator's run directory on this host. The program waits until train step `--step` is committed.
"""

import argparse
import json
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

COMMITTED = "parseInt(document.querySelector('#tiles dd')?.textContent.replaceAll(',', '')) || 0"
POLL_MS = 500
START_S = 60.0


def found(path: Path) -> str:
    """The text of a file that the run writes when it starts."""
    ends = time.monotonic() + START_S
    while not path.exists() and time.monotonic() < ends:
        time.sleep(POLL_MS / 1000)
    return path.read_text()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("run_dir", type=Path)
    options.add_argument("file", type=Path)
    options.add_argument("--step", type=int, default=0)
    options.add_argument("--width", type=int, default=1200)
    options.add_argument("--height", type=int, help="of the picture; the whole page without it")
    options.add_argument("--scheme", choices=["light", "dark"], default="light")
    chosen = options.parse_args()
    secret = json.loads(found(chosen.run_dir / "tokens" / "viewer.token"))["secret"]
    url = json.loads(found(chosen.run_dir / "coordinator.json"))["url"]
    size = {"width": chosen.width, "height": chosen.height or 1000}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport=size, color_scheme=chosen.scheme)
        page.goto(url)
        page.evaluate("secret => sessionStorage.setItem('secret', secret)", secret)
        page.reload()
        while page.evaluate(COMMITTED) < chosen.step:
            page.wait_for_timeout(POLL_MS)
        page.wait_for_timeout(POLL_MS)
        page.screenshot(path=chosen.file, full_page=chosen.height is None)
        browser.close()


if __name__ == "__main__":
    main()
