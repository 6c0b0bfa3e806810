"""Measures what the page costs with many workers: its first paint, and the coordinator's event loop.

    PYTHONPATH=$(bash tools/page/setup.sh | tail -1) python -m tools.page.measure [--workers 500] [--picture F]

A real coordinator has scripted workers (`tools/lab/echo2d_lab/bench/coordinator/shown_fleet.py`).

first paint: a real browser opens the page LOADS times; the time is that from the start of the navigation
until everything is drawn. Then the page stays open, and its requests are counted.

loop: the kernel counts the CPU time of the coordinator's first thread, on which its loop runs, by turns
while PAGES pages send requests like that one, and while no page does. All pages share one
status, which is made so often that it takes PAGE_SHARE_MAX of the loop's time for any number of pages;
the rest of the CPU time is divided by PAGES.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from playwright.sync_api import sync_playwright

from echo2d.runtime.coordinator.live_page import PAGE_SHARE_MAX

LOADS = 15
OPEN_S = 20.0
PAGES = 200
TURNS = 5
TURN_S = 20.0
POLL_S = 2.0
RATE = 5.0  # trajectories/s of all workers: low, so that the page's share shows
WARM_S = 30.0  # seconds until the first steps are trained


@contextmanager
def fleet(workers: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="echo2d-page-") as folder:
        arguments = [
            sys.executable,
            "-m",
            "echo2d_lab.bench.coordinator.shown_fleet",
            f"{folder}/run",
        ]
        process = subprocess.Popen(
            [*arguments, "--workers", str(workers), "--rate", str(RATE)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            time.sleep(WARM_S)
            yield json.loads(line)
        finally:
            process.terminate()
            process.wait()


def first_paint(url: str, secret: str, picture: Path | None) -> tuple[list[float], float]:
    """Milliseconds of each load, and requests per minute of a page that stays open."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme="dark")
        page.goto(url)
        page.evaluate("secret => sessionStorage.setItem('secret', secret)", secret)
        found = []
        for _ in range(LOADS):
            page.reload()
            while not page.evaluate("performance.getEntriesByName('painted').length"):
                page.wait_for_timeout(10)
            found.append(page.evaluate("performance.getEntriesByName('painted')[0].startTime"))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(1000 * OPEN_S)
        if picture is not None:
            page.screenshot(path=picture)
        browser.close()
    return found, 60 * len(asked) / OPEN_S


def loop_cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


async def ask(http: aiohttp.ClientSession, url: str, delay_s: float, end: float) -> None:
    """Send the requests of one page. Curves and scores are requested only after a new step."""
    await asyncio.sleep(delay_s)
    seen, plan, step, steps = 0, "", -1, 0
    while time.monotonic() < end:
        query: dict[str, str | int] = {"seen": seen, "plan": plan, "stripe": 0}
        async with http.get(f"{url}/v1/live", params=query) as answer:
            found = await answer.json()
        seen = found["seen"]
        plan = found["tree"]["plan"] if found.get("tree") else plan
        if found["now"]["committed_step"] != step:
            step = found["now"]["committed_step"]
            async with http.get(f"{url}/v1/history", params={"since": steps}) as answer:
                rows = (await answer.json())["rows"]
            steps = step if rows else steps
        await asyncio.sleep(POLL_S)


async def turn(url: str, secret: str, pid: int, pages: int) -> float:
    """CPU seconds of the loop in TURN_S."""
    before, end = loop_cpu_s(pid), time.monotonic() + TURN_S
    headers = {"Authorization": f"Bearer {secret}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(headers=headers, connector=connector) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(pages):
            tasks.create_task(ask(http, url, POLL_S * number / pages, end))
        tasks.create_task(asyncio.sleep(TURN_S))
    return loop_cpu_s(pid) - before


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--workers", type=int, default=500)
    options.add_argument("--picture", type=Path, help="a file for a picture of the page")
    chosen = options.parse_args()
    workers = chosen.workers
    with fleet(workers) as run:
        secret = json.loads(Path(run["token"]).read_text())["secret"]
        url, pid = run["url"], run["pid"]
        loads, asked = first_paint(url, secret, chosen.picture)
        ms = ", ".join(f"{each:.0f}" for each in sorted(loads))
        print(f"{workers} workers, first paint in ms: {ms}; then {asked:.0f} questions a minute")
        costs = []
        for _ in range(TURNS):
            without = asyncio.run(turn(url, secret, pid, 0))
            with_them = asyncio.run(turn(url, secret, pid, PAGES))
            costs.append(60 / TURN_S * (with_them - without))
            print(
                f"loop: {without / TURN_S:.1%} of a core with no page, "
                f"{with_them / TURN_S:.1%} with {PAGES}"
            )
        shared = 60 * PAGE_SHARE_MAX
        own = (median(costs) - shared) / PAGES
        print(
            f"a minute of one page: {1000 * shared:.0f} ms for the status, "
            f"{1000 * own:.0f} ms for its questions"
        )


if __name__ == "__main__":
    main()
