"""Where the repository is, for tests that read its files."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

# Documents name a test by its path below one of these.
TEST_ROOTS = tuple(REPO / "tests" / name for name in ("", "unit", "shells", "nightly"))

# `make nightly-trl` installs Hugging Face TRL here.
TRL_ENVIRONMENT = REPO / ".cache" / "trl"

# `make nightly-tinker` installs the official client of the Tinker API here.
TINKER_ENVIRONMENT = Path(os.environ.get("ECHO2D_SERVERS", REPO / ".cache")) / "tinker"
