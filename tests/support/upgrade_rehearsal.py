"""Rehearses upgrades of a small fleet with real programs, and prints what an operator sees.

    python -m tests.support.upgrade_rehearsal

Four boxes, a coordinator and a learner of the first release; the coordinator is upgraded to this checkout, then
two boxes; then the other two to a build that this checkout does not understand, and at last the coordinator, too.
docs/upgrade.md shows the transcript.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

from tests.support.builds import TODAY, Site, a_site, incompatible, released
from tests.support.polling import poll

BOXES = ("box-1", "box-2", "box-3", "box-4")
START = time.monotonic()


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def say(words: str) -> None:
    tell(f"[{time.monotonic() - START:4.0f} s] {words}")


def show(site: Site) -> None:
    """The coordinator, the boxes and the alerts, as in `echo2d status`."""
    facts = site.status()
    tell(f"       coordinator {facts['build']}, step {facts['committed_step']}")
    for row in sorted(facts["workers"], key=lambda row: row["name"]):
        tell(
            f"       {row['name']}  {row['state']:<9}  {row['build']:<16}  accepted {row['accepted']}"
        )
    for sentence in facts["attention"]:
        tell(f"     ! {sentence}")


def said(site: Site, name: str, words: str) -> None:
    """What a box says of it, without the time and the address."""
    line = re.sub(r"^.*?disconnected url=\S+ ", "", site.says(name, words))
    tell(f"       {name}: {line}")


def joined(site: Site, **builds: str) -> bool:
    rows = {row["name"]: row["build"] for row in site.status()["workers"] if row["alive"]}
    return all(rows.get(name.replace("_", "-")) == build for name, build in builds.items())


def trained(site: Site, steps: int) -> None:
    goal = site.status()["committed_step"] + steps
    poll(lambda: site.status()["committed_step"] >= goal, interval_s=1.0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, a_site(Path(folder)) as site:
        first, later = released(Path(folder)), incompatible(Path(folder), "0.9.0", 12)
        say("everything is echo2d 0.1.0")
        site.coordinate(first)
        for name in BOXES:
            site.join(name, first, owner=first)
        poll(lambda: len(site.status()["workers"]) == len(BOXES), interval_s=1.0)
        site.learn(first, steps=1_000_000)
        trained(site, 5)
        show(site)
        say("the coordinator is stopped, and started with the new build; nothing else is touched")
        site.stop("coordinator")
        site.coordinate(TODAY)
        poll(
            lambda: joined(site, **{name.replace("-", "_"): "0.1.0" for name in BOXES}),
            interval_s=1.0,
        )
        trained(site, 5)
        show(site)
        say("box-1 and box-2 are upgraded, one after the other")
        ours = str(site.status()["build"])
        for name in BOXES[:2]:
            site.stop(name)
            site.join(name, TODAY)
        poll(lambda: joined(site, box_1=ours, box_2=ours, box_3="0.1.0"), interval_s=1.0)
        trained(site, 5)
        show(site)
        say(
            "box-3 and box-4 are upgraded too far: to 0.9.0, which the coordinator does not understand"
        )
        for name in BOXES[2:]:
            site.stop(name)
            site.join(name, later)
        for name in BOXES[2:]:
            said(site, name, "refused this peer")
        trained(site, 5)
        show(site)
        say("the learner and the coordinator are upgraded to 0.9.0, too; the boxes are left alone")
        site.stop("learner")
        site.stop("coordinator")
        site.coordinate(later)
        for name in BOXES[:2]:
            said(site, name, "refused this peer")
        show(site)
        poll(lambda: joined(site, box_3="0.9.0", box_4="0.9.0"), interval_s=1.0)
        say("box-3 and box-4 have come again by themselves")
        show(site)


if __name__ == "__main__":
    main()
