"""A folder that task processes can write to. A process of another user can open neither `tmp_path` nor our /tmp."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/run" if os.geteuid() == 0 else None) as name:
        Path(name).chmod(0o777)
        yield Path(name)
