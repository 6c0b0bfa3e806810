"""Where the repository is, for tests that read its files."""

from pathlib import Path

REPO = Path(__file__).parents[2]

# `make trl-example` installs Hugging Face TRL here.
TRL_ENVIRONMENT = REPO / ".cache" / "trl"
