"""verifiers' training client, unmodified, plays episodes with a policy that is trained meanwhile.

Its traces must hold the tokens that the engine read and wrote, with their logprobs.
"""

import json
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPO
from tests.support.polling import START_S, poll
from tests.support.programs import Site
from tests.support.texts import chat_texts
from tests.support.verifiers_site import (
    EPISODES,
    INTERPRETERS,
    gateway_token,
    newest,
    secret_in,
    serves,
    write_chat_model,
)

CLIENT = REPO / "tools" / "envs" / "verifiers_client.py"
EXAMPLE = REPO / "examples" / "own_loop.py"
TURNS = 4
# More than the episodes take.
STEPS = 100_000
log = logging.getLogger(__name__)


@pytest.mark.skipif(not INTERPRETERS, reason="no verifiers here: `make nightly-envs` installs it")
@pytest.mark.parametrize("interpreter", INTERPRETERS or [""])
def test_traces_hold_what_the_engine_read_and_wrote(site: Site, interpreter: str) -> None:
    model = write_chat_model(site.directory / "model")
    config = site.config.read_text().replace(str(site.facts["model"]), str(model))
    site.config.write_text(f"{config}\n[gateway]\nenabled = true\nshare = 0.5\n")
    site.coordinate()
    site.join("box", "--threads=1", "--slots=32", f"--base-model={model}")
    token = site.run_dir / "tokens" / "learner.token"
    arguments = [site.url(), token, model, site.directory / "snapshots", STEPS]
    site.programs.start("learner", str(EXAMPLE), *map(str, arguments))
    poll(lambda: serves(site))
    began, before = time.monotonic(), newest(site)
    lines = played(interpreter, site, model)
    seconds, versions_published = time.monotonic() - began, newest(site) - before
    version, episodes = lines[0]["verifiers"], lines[1:]
    assert len(episodes) == EPISODES
    poll(lambda: len(records(site)) == EPISODES * TURNS)
    calls = {(*each["prompt"], *each["choices"][0]["tokens"]): each for each in records(site)}
    several = 0
    for episode in episodes:
        assert episode["extended"] == [True] * TURNS
        assert episode["one_branch"]
        assert episode["tokens"] == episode["last"]
        mask, logprobs, versions = replayed(calls, episode["tokens"])
        assert episode["mask"] == mask
        assert episode["logprobs"] == pytest.approx(logprobs, abs=1e-6)
        several += len(versions) > 1
    assert {each["outcome"] for each in calls.values()} == {"done"}
    log.info(
        "verifiers %s: %d episodes of %d turns in %.0f s, %d versions published meanwhile, "
        "%d episodes with several versions",
        version, EPISODES, TURNS, seconds, versions_published, several,
    )  # fmt: skip
    assert several, "no refit came while an episode was played"
    # What a message says is never a control token: each message begins and ends once.
    special = chat_texts().special
    given = [
        t
        for each in episodes
        for t, own in zip(each["tokens"], each["mask"], strict=True)
        if not own
    ]
    assert sum(token in special for token in given) >= EPISODES * TURNS * 4 - EPISODES


def replayed(
    calls: dict[tuple[int, ...], Any], tokens: list[int]
) -> tuple[list[bool], list[float], set[int]]:
    """What the gateway recorded of an episode's calls: which tokens were written, with which
    logprobs, by which versions.
    """
    written, logprobs, versions, end = [], list[float](), set[int](), 0
    for place in range(len(tokens)):
        call = calls.get(tuple(tokens[: place + 1]))
        if call is None:
            continue
        [choice] = call["choices"]
        written += [False] * (len(call["prompt"]) - end) + [True] * len(choice["tokens"])
        logprobs += choice["logprobs"]
        spans = choice["version_spans"]
        assert (spans[0]["start"], spans[-1]["end"]) == (0, len(choice["tokens"]))
        versions |= {span["version"] for span in spans}
        end = place + 1
    assert end == len(tokens)
    return written, logprobs, versions


def played(interpreter: str, site: Site, model: Path) -> list[Any]:
    secret = secret_in(gateway_token(site, "gateway"))
    done = subprocess.run(
        [interpreter, str(CLIENT), site.url(), str(model), str(EPISODES), str(TURNS)],
        env={**os.environ, "GATEWAY_SECRET": secret, "PYTHONPATH": ""},
        capture_output=True, text=True, check=False, timeout=20 * START_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def records(site: Site) -> list[Any]:
    path = site.run_dir / "gateway.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
