"""The example of a user's own trainer, with a real coordinator and worker."""

import pytest

from tests.support.paths import REPO
from tests.support.polling import START_S, poll
from tests.support.programs import Site

pytestmark = [pytest.mark.timeout(900)]

EXAMPLE = REPO / "examples" / "own_loop.py"
STEPS = 3


def test_a_loop_of_plain_torch_trains_and_publishes(site: Site) -> None:
    coordinator = site.coordinate()
    site.join("box", "--threads=1")
    token = site.run_dir / "tokens" / "learner.token"
    arguments = [site.url(), token, site.facts["model"], site.directory / "snapshots", STEPS]
    own = site.programs.start("own", str(EXAMPLE), *map(str, arguments))
    assert own.wait(3 * START_S) == 0, own.tail()
    poll(lambda: site.serving() == STEPS)
    facts = site.status()
    assert (facts["committed_step"], facts["versions_published"]) == (STEPS, STEPS + 1)
    assert not list((site.directory / "snapshots").iterdir())
    assert coordinator.log.read_text().count("as a delta") >= STEPS


def test_the_example_has_no_more_lines_than_the_readme_says() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 80
    assert sum(bool(line.strip()) for line in lines) <= 64
