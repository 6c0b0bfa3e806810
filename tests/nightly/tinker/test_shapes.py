"""The requests of the official client, with their fields and types, against those of the release that was tested.

`make nightly-canary` runs this with the newest release, and reports the lines that begin with CHANGED.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from tests.support.paths import REPO, TINKER_ENVIRONMENT
from tests.support.tinker_recipes import BASE_MODEL, recipe_model
from tests.support.tinker_run import tinker_run
from tests.support.tinker_shapes import Recorder, changes

SHAPES = Path(__file__).with_name("shapes.json")
CLIENT_S = 300.0
STEPS = (
    "create", "train", "save", "load", "sample", "logprobs", "reinforce", "list", "close",
)  # fmt: skip


async def tour(base_url: str, key: str, home: Path) -> list[str]:
    """Run `tests/support/tinker_tour.py` in the client's environment; returns its lines."""
    process = await asyncio.create_subprocess_exec(
        TINKER_ENVIRONMENT / "venv" / "bin" / "python", "-m", "tests.support.tinker_tour", base_url, BASE_MODEL,
        cwd=REPO, stdout=asyncio.subprocess.PIPE,
        env={"PATH": os.defpath, "HOME": str(home), "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"},
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    try:
        async with asyncio.timeout(CLIENT_S):
            while line := await process.stdout.readline():
                lines.append(line.decode().strip())
    except TimeoutError:
        lines.append(f"the client has not ended in {CLIENT_S:g} s")
        process.kill()
    await process.wait()
    return lines


async def test_the_client_sends_what_the_tested_release_sends(tmp_path: Path) -> None:
    with tinker_run(tmp_path / "served", recipe_model(tmp_path / "model")) as run:
        recorder = Recorder(run.url)
        async with TestServer(recorder.app()) as server:
            steps = await tour(str(server.make_url("")), run.key(), tmp_path)
    found = tmp_path / "shapes.json"
    found.write_text(json.dumps(recorder.shape, indent=1) + "\n")
    lines = [line for line in steps if not line.endswith(": done")]
    if (count := len(STEPS) - len(steps)) > 0:
        lines.append(f"the client ended before {', '.join(STEPS[-count:])}")
    lines += changes(json.loads(SHAPES.read_text()), recorder.shape)
    if lines:
        said = "\n".join(f"CHANGED {line}" for line in lines)
        pytest.fail(f"{said}\nall requests: {found}", pytrace=False)
