"""Writes docs/reference/keys.md: every key of every file, as its table declares it.

`python -m tests.support.keys_page`
"""

from echo2d.config.coordinator import print_config
from echo2d.config.tables import print_tables
from echo2d.learner.config import LearnerConfig
from echo2d.learner.sft import SftTable
from echo2d.plan.fleet.spec import TABLES
from tests.support.paths import REPO

PAGE = REPO / "docs" / "reference" / "keys.md"
HEAD = """# Every key

What a file may say, with defaults, limits and choices. `python -m tests.support.keys_page` writes this page from
the tables in which the keys are declared. A key that is commented out is required, or is nothing unless it is set.

"""


def page() -> str:
    parts = {
        "The coordinator and a worker: `run.toml`, `worker.toml`": print_config(),
        "The learner: `[learner]` of `run.toml`, and `[sft]` for `--sft`": print_tables(
            LearnerConfig, SftTable
        ),
        "A fleet, for `echo2d plan` and `echo2d simulate`": print_tables(*TABLES).replace(
            "[fleet]", "[[fleet]]"
        ),
    }
    return HEAD + "\n".join(
        f"## {title}\n\n```toml\n{text.strip()}\n```\n" for title, text in parts.items()
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
