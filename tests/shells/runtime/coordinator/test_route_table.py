"""Every route of a coordinator with a gateway, with every kind of credential: no holder gets more than it may."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from echo2d.core.coordinator.events import Recovered
from echo2d.core.coordinator.state import PLAN_SECRET_BYTES, CoordinatorState
from echo2d.core.rules.run import RunRules
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from tests.support.scripted_core import make_config, serving

CREDENTIALS = ("none", "junk", "worker", "viewer", "gateway", "agent", "learner", "operator")
# Statuses in the order of CREDENTIALS. A call that is let in has a bad body, and says so with 400 or
# 404, or with 409, because no learner has a session.
LEARNER = (401, 401, 403, 403, 403, 403, 400, 403)
FENCED = (*LEARNER[:-2], 409, 403)
READERS = (401, 401, 403, 200, 200, 403, 200, 200)
CALLS = (401, 401, 403, 403, 404, 403, 403, 403)
# No worker with such an id has enrolled.
OPERATOR = (401, 401, 403, 403, 403, 403, 403, 400)
NOTHING = (404,) * 8
ROUTES: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("GET", "/"): (200,) * 8,
    ("GET", "/healthz"): (200,) * 8,
    # No seed is here.
    ("GET", "/readyz"): (503,) * 8,
    ("GET", "/v1/worker"): (400,) * 8,
    # The body is read once the secret is known. A token of another role enrols nobody even then.
    ("POST", "/v1/enrol"): (401, 401, 400, 400, 400, 400, 400, 400),
    ("POST", "/v1/learner/session"): LEARNER,
    ("GET", "/v1/learner/session"): (401, 401, 403, 403, 403, 403, 200, 403),
    ("POST", "/v1/learner/checkpoint"): LEARNER,
    ("POST", "/v1/versions"): LEARNER,
    ("PUT", "/v1/versions/0/files/model.safetensors"): LEARNER,
    ("PUT", "/v1/versions/0/files/model.safetensors?epoch=7"): FENCED,
    ("GET", "/v1/batches/1"): LEARNER,
    ("GET", "/v1/batches/1?epoch=7"): FENCED,
    ("POST", "/v1/batches/1/commit"): LEARNER,
    ("POST", "/v1/batches/1/refuse"): LEARNER,
    ("GET", "/v1/evaluations"): READERS,
    ("GET", "/v1/evaluations?after=x"): (401, 401, 403, 400, 400, 403, 400, 400),
    ("POST", "/v1/evaluations"): LEARNER,
    ("GET", "/v1/samples"): (401, 401, 403, 403, 403, 403, 200, 403),
    ("GET", "/v1/samples?step=x"): (401, 401, 403, 403, 403, 403, 400, 403),
    ("POST", "/v1/workers/box/cordon"): OPERATOR,
    ("POST", "/v1/workers/box/uncordon"): OPERATOR,
    ("POST", "/v1/workers/box/drain"): OPERATOR,
    ("POST", "/v1/workers/box/end"): NOTHING,
    ("GET", "/v1/wheel"): (401, 401, 200, 403, 403, 403, 403, 403),
    ("POST", "/v1/uplink"): (401, 401, 200, 403, 403, 403, 403, 403),
    ("GET", "/page/main.js"): (200,) * 8,
    ("GET", "/page/../v1/status"): READERS,
    ("GET", "/page/nothing.js"): NOTHING,
    ("GET", "/v1/history"): READERS,
    ("GET", "/v1/history?since=x"): (401, 401, 403, 400, 400, 403, 400, 400),
    ("GET", "/v1/live"): READERS,
    ("GET", "/v1/live?stripe=-1"): (401, 401, 403, 400, 400, 403, 400, 400),
    ("GET", "/v1/status"): READERS,
    # Every role but a worker's may see the run; a worker's sees the boxes enrolled with it.
    ("GET", "/v1/status/own"): (401, 401, 200, 403, 403, 403, 403, 403),
    ("GET", "/metrics"): READERS,
    ("GET", "/v1/models"): (401, 401, 403, 403, 200, 403, 403, 403),
    ("POST", "/v1/episodes"): (401, 401, 403, 403, 403, 503, 403, 403),
    # A ticket is the credential, and this is none.
    ("GET", "/v1/episodes/ep_x"): (401,) * 8,
    ("POST", "/v1/episodes/ep_x/end"): (401,) * 8,
    ("POST", "/v1/chat/completions"): CALLS,
    ("POST", "/v1/completions"): CALLS,
    ("POST", "/inference/v1/generate"): CALLS,
    ("GET", "/v1/nothing"): NOTHING,
    ("GET", "/v1/versions/0/files/../../../run.key"): NOTHING,
    ("DELETE", "/v1/status"): (405,) * 8,
    ("OPTIONS", "/v1/learner/session"): (405,) * 8,
    ("TRACE", "/v1/status"): (405,) * 8,
}


def machine(rules: RunRules, recovered: Recovered) -> CoordinatorState:
    secret = bytes(PLAN_SECRET_BYTES)
    return CoordinatorState(rules, recovered, plan_secret=secret, now=time.monotonic())


def secrets_of(run_dir: Path) -> dict[str, str | None]:
    table = AccessTable(RunDirectory(run_dir))
    made = {role: table.create(f"a-{role}", role).secret for role in (*CREDENTIALS[2:], "tinker")}
    return {"none": None, "junk": "junk", **made}


Place = Callable[[str], dict[str, Any]]
PLACES: Mapping[str, Place] = {
    "bearer": lambda secret: {"headers": {"Authorization": f"Bearer {secret}"}},
    "basic": lambda secret: {
        "headers": {"Authorization": aiohttp.encode_basic_auth("user", secret)}
    },
    "cookie": lambda secret: {"cookies": {"token": secret, "Authorization": f"Bearer {secret}"}},
    "query": lambda secret: {"params": {"token": secret, "access_token": secret}},
}


async def ask_all(
    url: str, secrets: Mapping[str, str | None], place: Place
) -> dict[tuple[str, str], tuple[int, ...]]:
    """The statuses of every route, in the order of `secrets`."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for method, path in ROUTES:
        statuses = []
        for secret in secrets.values():
            more = {} if secret is None else place(secret)
            body = b"{}" if method in ("POST", "PUT") else None
            async with (
                aiohttp.ClientSession(cookies=more.pop("cookies", None)) as session,
                session.request(method, url + path, data=body, **more) as response,
            ):
                await response.read()
                statuses.append(response.status)
        found[method, path] = tuple(statuses)
    return found


@pytest.mark.parametrize("place", PLACES)
async def test_no_holder_gets_more_than_its_role_allows(tmp_path: Path, place: str) -> None:
    """Only a bearer secret counts; anywhere else it is as good as none."""
    config = make_config(tmp_path, **{"gateway.enabled": True})
    async with serving(config, machine) as opened:
        secrets = await asyncio.to_thread(secrets_of, config.run.run_dir)
        tinker = {"tinker": secrets.pop("tinker")}
        found = await ask_all(opened.url, secrets, PLACES[place])
        of_tinker = await ask_all(opened.url, tinker, PLACES[place])
    # Its own routes are those of a run with [tinker]; elsewhere it may as little as an agent.
    as_agent = {route: (statuses[CREDENTIALS.index("agent")],) for route, statuses in found.items()}
    assert of_tinker == as_agent | ({("POST", "/v1/episodes"): (403,)} if place == "bearer" else {})
    nobody = {route: (statuses[0],) * 8 for route, statuses in ROUTES.items()}
    assert found == (dict(ROUTES) if place == "bearer" else nobody)
