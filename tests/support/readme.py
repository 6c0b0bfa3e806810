"""The commands of README's section "Five minutes on two machines", as a person types them."""

import re

from tests.support.paths import REPO

LEARNER_HOST, BOX = "10.0.0.1", "10.0.0.2"  # their addresses there
# "In a clone of this repository", on both machines.
CLONED = ("git clone", "cd echo2d") * 2


def first_steps() -> tuple[list[str], list[str]]:
    """The lines of its two terminals: on the learner host, and on the box."""
    page = (REPO / "README.md").read_text()
    section = page.partition("## Five minutes on two machines")[2].partition("\n## ")[0]
    blocks = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    host, box = (
        [re.sub(r" +#.*", "", line) for line in re.findall(r"^\$ (.+)$", block, re.MULTILINE)]
        for block in blocks
    )
    return host, box
