"""`echo2d doctor --config run.toml`: checks whether this host can lead the run, and a coordinator that runs."""

import asyncio
import json
import math
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from echo2d.client.http import STATUS_PATH
from echo2d.config.checks import config_cautions
from echo2d.config.coordinator import CoordinatorConfig, LinkTable
from echo2d.core.status.json_form import read_status
from echo2d.core.status.schema import Status
from echo2d.errors import OperatorFault, PeerFault, StoreFault
from echo2d.model_files import require_model
from echo2d.net.security.auth import read_token_file
from echo2d.net.security.tls import Tls, to_coordinator
from echo2d.runtime.doctor import host
from echo2d.runtime.doctor.coordinator_view import authority, coordinator, open_session, port_open
from echo2d.runtime.doctor.finding import HostFinding, error, ok, skipped, warning
from echo2d.runtime.run_dir.run_directory import find_coordinator
from echo2d.runtime.run_dir.tokens import list_tokens
from echo2d.texts.reference import difference

# The disk needs room for this many versions: the newest, and the next while it is written.
_VERSIONS_ON_DISK = 2
EXPIRY_S_MIN = 7 * 86400.0
# The learner calls every few seconds; a long train step may take minutes.
LEARNER_SILENT_S_MAX = 600.0
_REFIT_SHARE_MAX = 0.05  # of a box's time; below it, refits are cheap
_NAMES_MAX = 8


async def examine_learner_host(config: CoordinatorConfig) -> list[HostFinding]:
    run_dir = config.run.run_dir
    try:
        url, token_file = await asyncio.to_thread(find_coordinator, run_dir)
    except OperatorFault:
        found = await asyncio.to_thread(_free_ports, config)
    else:
        found = await _running(config, url, token_file)
    return [
        *found,
        *await asyncio.to_thread(_tokens, run_dir),
        *await asyncio.to_thread(_disks, config),
        *await asyncio.to_thread(_model, config),
        *await asyncio.to_thread(_texts, config.run.base_model),
        *await asyncio.to_thread(_answers, config),
        await asyncio.to_thread(host.torch_package),
        await asyncio.to_thread(host.gpu, needed=False),
        *await asyncio.to_thread(host.limits),
        await asyncio.to_thread(host.systemd),
    ]


# --- a coordinator that runs


async def _running(config: CoordinatorConfig, url: str, token_file: Path) -> list[HostFinding]:
    token = await asyncio.to_thread(read_token_file, token_file)
    tls = await asyncio.to_thread(Tls.of, url, token.authority)
    found = [] if tls is None else [authority(token.authority)]
    async with open_session() as http:
        seen = await coordinator(http, url, tls)
        found += seen
        if seen[0].level == "error":
            return found
        headers = {"Authorization": f"Bearer {token.secret}"}
        try:
            async with http.get(url + STATUS_PATH, headers=headers, **to_coordinator(tls)) as reply:
                status = read_status(await reply.json())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, PeerFault) as fault:
            todo = "stop it and start it with this build"
            words = f"the coordinator's status is not readable: {fault}"
            return [*found, error("status", words, todo)]
    return [*found, *await _seed_port(config.link), *_of_the_run(status)]


async def _seed_port(link: LinkTable) -> list[HostFinding]:
    if not link.port:
        todo = "set link.port, so that a firewall can let it in: 7701"
        return [warning("seed port", "link.port = 0: another port at each start", todo)]
    fault = await port_open(link.host, link.port)
    at = f"[{link.host}]:{link.port}" if ":" in link.host else f"{link.host}:{link.port}"
    if fault:
        todo = "the coordinator's log says why; it starts the seed again"
        return [error("seed port", f"the seed does not answer at {at}: {fault}", todo)]
    return [ok("seed port", f"the seed answers at {at}")]


def _of_the_run(status: Status) -> Iterator[HostFinding]:
    silent_s = None if status.process is None else status.process.learner_silent_s
    if silent_s is None:
        yield skipped("learner", "no learner has called since the coordinator started")
    elif silent_s > LEARNER_SILENT_S_MAX:
        todo = "look at its log; echo2d learn --config run.toml --resume"
        yield error("learner", f"it was last heard {silent_s:,.0f} s ago", todo)
    else:
        yield ok("learner", f"heard {silent_s:.0f} s ago")
    here = [worker for worker in status.workers if worker.alive]
    hidden = [worker.name for worker in here if worker.reachable is False]
    if hidden:
        yield warning(
            "workers",
            f"{len(hidden)} of {len(here)} cannot be dialled: {_names(hidden)}",
            "open their ports if you can (docs/guide/operating.md, Who can be dialled)",
        )
    else:
        yield ok("workers", f"{len(here)} are here, and none is known to be out of reach")
    costs = [
        (worker.refit_pause_s, worker.recompute_s or 0.0, worker.name)
        for worker in here
        if worker.refit_pause_s is not None
    ]
    train_s = status.provision.estimates.t_train_s
    if costs and train_s is not None:
        yield refit_finding(
            *max(costs, key=lambda each: each[0] + each[1]),
            between_s=status.publish_every * train_s.value,
            mixes=status.audit is None or status.audit.learnt_mixed is not None,
        )
    if status.attention:
        text = f"{len(status.attention)}; the first: {status.attention[0]}"
        yield warning("alerts", text, "echo2d status shows them all")


def refit_finding(
    pause_s: float, recompute_s: float, name: str, *, between_s: float, mixes: bool
) -> HostFinding:
    """What refits cost the box that they cost most, and what would cost less.

    between_s: train time from one version to the next. mixes: whether the run takes answers whose KV caches are of
    several versions.
    """
    share = (pause_s + recompute_s) / between_s
    text = (
        f"{name} loses {pause_s:.2g} s of pause and {recompute_s:.2g} s of KV caches computed again at each version: "
        f"{share:.0%} of the {between_s:.3g} s until the next one"
    )
    if share <= _REFIT_SHARE_MAX:
        return ok("refits", text)
    if not pause_s:
        todo = (
            "adapters pause nothing, and only requests that outlive policy.staleness_max versions are cut: raise it, "
            "or publish less often"
        )
    elif pause_s >= recompute_s:
        todo = (
            "if it uses a server at an engine_url, without quantized weights, let the worker start it: then only "
            "changed words are written"
        )
    else:
        first = "" if mixes else "set audit.in_place = true in run.toml, then "
        todo = f'{first}if it runs SGLang, set worker.refit_mode = "in_place" there, which loses only the pause'
    return warning("refits", text, todo)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_MAX} more" if len(names) > _NAMES_MAX else ""
    return ", ".join(names[:_NAMES_MAX]) + more


# --- a coordinator that does not run


def _free_ports(config: CoordinatorConfig) -> list[HostFinding]:
    serve, link = config.coordinator, config.link.beside(config.coordinator)
    found = [skipped("coordinator", f"none runs in {config.run.run_dir}")]
    found += [
        _free(name, address, port)
        for name, address, port in (
            ("coordinator", serve.host, serve.port),
            ("link", link.host, link.port or 0),
        )
    ]
    return found


def _free(table: str, address: str, port: int) -> HostFinding:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as fault:
        text = f"{table}.host, {table}.port: cannot listen on {address}:{port}: {fault.strerror}"
        return error(f"{table} port", text, "take an address of this host, and a port that is free")
    return ok(f"{table} port", f"{address}:{port or 'any port'} is free")


# --- tokens and disks


def _tokens(run_dir: Path) -> list[HostFinding]:
    try:
        rows = list_tokens(run_dir)
    except (OperatorFault, StoreFault) as fault:
        return [skipped("tokens", f"{fault}: it is made by the first start")]
    valid = [row for row in rows if row["state"] == "valid"]
    soon = [
        row["name"]
        for row in valid
        if row["expires_in_s"] is not None and row["expires_in_s"] < EXPIRY_S_MIN
    ]
    over = [row["name"] for row in rows if row["state"] == "expired"]
    found = [
        warning("tokens", f"{words}: {_names(names)}", "make new ones: echo2d token create")
        for words, names in (("expired", over), ("these expire within a week", soon))
        if names
    ]
    return found or [ok("tokens", f"{len(valid)} are valid for another week")]


def _model(config: CoordinatorConfig) -> list[HostFinding]:
    """Whether the base model's files are whole."""
    if (model := config.run.base_model) is None:
        return []
    try:
        require_model(model, trains=bool(config.learner))
    except OperatorFault as fault:
        return [error("model", f"run.base_model: {fault}", "repair it: coordinate refuses it")]
    return [ok("model", "the files of run.base_model are whole")]


def _texts(model: Path | None) -> list[HostFinding]:
    """Whether prompts become the same tokens here as with `transformers`."""
    if model is None or not (model / "tokenizer.json").exists():
        return [skipped("texts", "run.base_model names no model with a tokenizer.json")]
    try:
        differs = difference(model)
    except OperatorFault as fault:
        todo = "save the tokenizer again, or take another model (docs/reference/models.md)"
        return [error("texts", str(fault), todo)]
    if differs is None:
        return [
            skipped(
                "texts", "not compared: transformers is not installed, or cannot read the files"
            )
        ]
    if differs:
        todo = "report it, with the model's name: prompts are not those that the model knows"
        return [error("texts", differs, todo)]
    return [ok("texts", "prompts have the tokens that transformers makes of them")]


def _answers(config: CoordinatorConfig) -> list[HostFinding]:
    """Whether answers have room in the model's context."""
    model: Mapping[str, Any] = {}
    if config.run.base_model is not None:
        with suppress(OSError, ValueError):
            model = json.loads((config.run.base_model / "config.json").read_bytes())
    cautions = config_cautions(config, model, {})
    todo = "echo2d try --config run.toml shows answers"
    return [warning("answers", each, todo) for each in cautions] or [
        ok("answers", "nothing in the config keeps them short")
    ]


def _disks(config: CoordinatorConfig) -> list[HostFinding]:
    run = config.run
    size = _version_bytes(config)
    needed = None if size is None else math.ceil(_VERSIONS_ON_DISK * size)
    found = host.disk("run dir", run.run_dir, needed_bytes=needed, needed_for="two versions")
    if not run.snapshot_root.is_dir():
        text = f"run.snapshot_root: {run.snapshot_root} is not there yet; the learner makes it"
        return [*found, skipped("snapshot root", text)]
    if not _one_file_system(run.run_dir, run.snapshot_root):
        found.append(
            warning(
                "snapshot root",
                f"{run.snapshot_root} and {run.run_dir} are on two file systems: versions are copied",
                "put both on one, so that they are linked",
            )
        )
    return found


def _version_bytes(config: CoordinatorConfig) -> int | None:
    """The size of the largest version that is kept, else of the base model. None: there is neither."""
    versions = config.run.run_dir / "versions"
    kept = [host.bytes_in(each) for each in versions.iterdir()] if versions.is_dir() else []
    model = config.run.base_model
    return max(kept, default=0) or (None if model is None else host.bytes_in(model)) or None


def _one_file_system(one: Path, other: Path) -> bool:
    one = one.absolute()
    while not one.exists():
        one = one.parent
    return one.stat().st_dev == other.stat().st_dev
