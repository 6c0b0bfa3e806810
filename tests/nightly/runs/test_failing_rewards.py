"""A reward that always fails ends a real run within a minute of its first failure, with file and line."""

import logging
import time

import pytest

from tests.support.polling import START_S, poll
from tests.support.programs import Site
from tests.support.rows_site import ask_rows

pytestmark = [pytest.mark.timeout(900)]

WITHIN_S = 60.0
SCORERS = {
    "raises": 'raise ValueError("my judge is broken")',
    "none": "return None",
    "nan": 'return float("nan")',
    "text": 'return "0.5"',
    "hangs": "import time; time.sleep(3600)",
    "away": 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:9/")',
}


@pytest.mark.parametrize("kind", SCORERS)
@pytest.mark.parametrize("boxes", [1, 2])
def test_a_run_whose_rewards_always_fail_ends(site: Site, kind: str, boxes: int) -> None:
    ask_rows(site, "")
    (site.directory / "judge.py").write_text(f"def score(answer, expected):\n    {SCORERS[kind]}\n")
    text = site.config.read_text().replace(
        'prompt = "digits"', 'scorer = "judge:score", prompt = "digits"'
    )
    site.config.write_text(text)
    coordinator = site.coordinate()
    for number in range(boxes):
        site.join(f"box-{number}", "--threads=1")
    site.learn(100)
    log = coordinator.log
    poll(lambda: "failed: " in log.read_text())
    first = time.monotonic()
    poll(lambda: coordinator.returncode is not None)
    took_s = time.monotonic() - first
    assert took_s < WITHIN_S
    assert coordinator.returncode == 2
    last = log.read_text().splitlines()[-1]
    assert "the rewards of task 'digits' do not come: " in last, last
    assert ": row " in last
    if kind != "hangs":
        assert "judge.py:" in last
    assert log.read_text().count("task=digits failed: ") <= 2, "each kind of failure once"
    logging.getLogger(__name__).info("%s with %d boxes ended after %.1f s", kind, boxes, took_s)


def is_away(site: Site) -> bool:
    return any(
        (each["failing"] or {}).get("retry_s") is not None for each in site.status()["tasks"]
    )


def test_a_run_waits_for_a_judge_that_is_away_for_a_while(site: Site) -> None:
    ask_rows(site, "")
    (site.directory / "judge.py").write_text(
        "from pathlib import Path\n"
        "def score(answer, expected):\n"
        "    if (Path(__file__).parent / 'away').exists():\n"
        "        raise ConnectionError('the judge is away')\n"
        "    return float(answer.text == expected.text)\n"
    )
    text = site.config.read_text().replace(
        'prompt = "digits"', 'scorer = "judge:score", prompt = "digits"'
    )
    reads = f'processes = 1\nread_paths = ["{site.directory}"]'
    site.config.write_text(text.replace("processes = 1", reads))
    site.directory.chmod(0o755)
    coordinator = site.coordinate()
    site.join("box", "--threads=1")
    learner = site.learn(20)
    poll(lambda: site.status()["committed_step"] >= 2)
    (site.directory / "away").touch()
    poll(lambda: is_away(site))
    assert any(each["kind"] == "rewards_fail" for each in site.status()["alerts"])
    (site.directory / "away").unlink()
    assert learner.wait(4 * START_S) == 0, learner.tail()
    assert coordinator.returncode is None
