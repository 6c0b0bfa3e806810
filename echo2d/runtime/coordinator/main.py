"""`echo2d coordinate`: assembles the coordinator, serves until a signal, and takes it apart.

    ledger -> access table -> version files -> task pool -> HTTP listener -> address file

Each part is closed in the reverse order. The address file is written last, so if a program of
this host finds the file, the coordinator already listens. Not here: the loop (`loop`), or any
decision about the run (`core/coordinator/state.py`).
"""

import asyncio
import errno
import importlib.util
import json
import logging
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.config.checks import config_cautions
from echo2d.config.coordinator import CoordinatorConfig, LinkTable, ServeTable
from echo2d.core.base.ids import RunId
from echo2d.core.base.model_config import context_max, end_token_ids, expert_numbers, vocab_size
from echo2d.core.cluster.events import VersionPublished
from echo2d.core.coordinator.events import Recovered
from echo2d.core.coordinator.state import CoordinatorState
from echo2d.core.protocol.answer_end import CONTEXT_SPARE
from echo2d.core.protocol.experts import EXPERTS
from echo2d.core.protocol.seeds import seed_key
from echo2d.core.rules.audit import AuditRules
from echo2d.core.rules.run import RunRules
from echo2d.core.rules.tasks import GatewayRules
from echo2d.core.tinker.held_snapshots import HELD_MAX
from echo2d.errors import OperatorFault
from echo2d.extras import install_command
from echo2d.net.api.page import read_page
from echo2d.net.api.routes import make_app
from echo2d.net.http.serving import make_runner, make_site
from echo2d.net.security.auth import Role, public_bytes
from echo2d.net.security.tls import GIVEN_UP, Tls
from echo2d.net.security.urls import WILDCARDS, is_loopback
from echo2d.net.tinker.models import ServedModels
from echo2d.process_environment import notifier
from echo2d.runtime.audit.audit_log import open_audit_log
from echo2d.runtime.audit.supervisor import AuditHandover, supervise_auditor
from echo2d.runtime.coordinator.agent_episodes import Tickets
from echo2d.runtime.coordinator.data_plane import (
    OpenEval,
    OpenTask,
    begin_tasks,
    data_plane,
    drawn,
    eval_rules,
    open_evals,
    open_tasks,
    task_rules,
    turn_end_cautions,
)
from echo2d.runtime.coordinator.gateway import Gateway, NewestTexts, read_template
from echo2d.runtime.coordinator.journals import Journals
from echo2d.runtime.coordinator.loop import CoordinatorProcess, Emit, Machine, ProcessSettings
from echo2d.runtime.coordinator.run_facts import day_of, facts_of, go_on, run_facts
from echo2d.runtime.coordinator.run_history import RunHistory
from echo2d.runtime.coordinator.sample_log import open_sample_log
from echo2d.runtime.process.lifecycle import Ending, collect_rarely
from echo2d.runtime.renting.renter import boxes_left_alone, open_renter
from echo2d.runtime.renting.setup import prices_of
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.backup import forget_killed_backups
from echo2d.runtime.run_dir.ledger_thread import LedgerThread
from echo2d.runtime.run_dir.run_directory import (
    LEDGER_FILE,
    RunDirectory,
    announce,
    require_new_or_whole,
    withdraw,
)
from echo2d.runtime.run_dir.tokens import own_token
from echo2d.runtime.run_dir.version_files import VersionFiles
from echo2d.runtime.seed.supervisor import SeedHandover, supervise_seed
from echo2d.store.json_log import JsonLog
from echo2d.texts.files import read_text_files
from echo2d.texts.model_texts import ModelTexts

# SQLite releases the interpreter at every statement, and the ledger's thread must get it back while
# the loop is busy. With Python's default of 5 ms, a commit of ten statements could wait for 50 ms.
SWITCH_S = 0.0005
# A sample of the Tinker API may wait this long for a worker.
SAMPLE_WAIT_S = 86400.0

log = logging.getLogger("echo2d.coordinator")

MakeMachine = Callable[[RunRules, Recovered], Machine]


def core_machine(rules: RunRules, recovered: Recovered) -> Machine:
    """The core of a real run; tests pass another `make_machine`."""
    return CoordinatorState(
        rules, recovered, plan_secret=secrets.token_bytes(32), now=time.monotonic()
    )


@dataclass(frozen=True, slots=True)
class Opened:
    """A coordinator that listens, with what its seed and its auditor need to join it."""

    coordinator: CoordinatorProcess
    url: str
    seed: SeedHandover
    audit: AuditHandover | None
    run: RunDirectory
    access: AccessTable


async def run_coordinator(config: CoordinatorConfig, *, rent: bool = False) -> int:
    """Serve until SIGTERM or SIGINT, then return exit code 0. `rent`: also rent boxes.

    OperatorFault: the coordinator cannot start with this configuration. Fault: the run cannot go
    on.
    """
    with Ending() as ending:
        async with open_coordinator(config) as opened, AsyncExitStack() as stack:
            helpers = [supervise_seed(opened.seed, rng=random.Random())]
            if opened.audit is not None:
                helpers.append(supervise_auditor(opened.audit, rng=random.Random()))
            if rent:
                helpers.append(await stack.enter_async_context(_renting(config, opened)))
            elif left := await asyncio.to_thread(boxes_left_alone, config):
                log.warning(
                    "not_renting left=%s: they are not managed without --rent; see `echo2d rented`",
                    left,
                )
            # All objects that live as long as the process have been made.
            collect_rarely()
            sys.setswitchinterval(SWITCH_S)
            ending.by_signals(opened.coordinator.stop)
            await opened.coordinator.serve(*helpers)
    log.info("stopped")
    return 0


@asynccontextmanager
async def _renting(
    config: CoordinatorConfig, opened: Opened
) -> AsyncIterator[Coroutine[Any, Any, None]]:
    """A coroutine that rents boxes for this coordinator until it is cancelled."""
    async with open_renter(config, opened.run, opened.access, url=opened.url) as renter:
        opened.coordinator.view.renting = renter.status
        yield renter.rent(opened.coordinator.look, opened.coordinator.plan_removal)


@asynccontextmanager
async def open_coordinator(
    config: CoordinatorConfig, *, make_machine: MakeMachine = core_machine
) -> AsyncIterator[Opened]:
    """Do everything but run the loop: recover, listen, write the address file. The caller serves.

    OperatorFault: the coordinator cannot start with this configuration.
    """
    await asyncio.to_thread(require_new_or_whole, config.run.run_dir, config.folder)
    await asyncio.to_thread(_make_snapshot_root, config.run.snapshot_root)
    run = await asyncio.to_thread(RunDirectory, config.run.run_dir)
    tls = await asyncio.to_thread(run.authority.coordinator) if _uses_tls(config) else None
    async with AsyncExitStack() as stack:
        ledger, recovered = await _open_ledger(stack, run)
        # Check the port after the ledger's lock: if the run has a coordinator already, that is the better reason.
        await asyncio.to_thread(_check_link, config.link)
        # The ledger is locked now, so an address file can only be left from a coordinator that was killed.
        await asyncio.to_thread(withdraw, run)
        await asyncio.to_thread(forget_killed_backups, run.path)
        names = config.audit.trusted if config.audit.enabled else ()
        access = await asyncio.to_thread(AccessTable, run, names)
        files, recovered = await _open_files(config, run, access, recovered)
        work = await _open_work(stack, config, run, ledger, recovered)
        if config.run.base_model is not None and any(task.texts for task in work.tasks):
            await asyncio.to_thread(files.pin_texts, config.run.base_model)
        newest = recovered.published[-1] if recovered.published else None
        plane = data_plane(work.tasks, work.evals, work.rules)
        template = await asyncio.to_thread(read_template, config.gateway.chat_template)
        office = Tickets(plane.agents, seed_key(run.key.private_bytes_raw()), recovered.groups)

        def make_gateway(emit: Emit) -> Gateway:
            return Gateway(
                config.gateway,
                work.rules,
                NewestTexts(files, newest, template, work.day),
                call_log=_call_log(config, run),
                caller=lambda secret: access.caller(secret, now_s=time.time()),
                emit=emit,
                office=office,
            )

        coordinator = CoordinatorProcess(
            run,
            make_machine(work.rules, recovered),
            access=access,
            ledger=ledger,
            data_plane=plane,
            files=files,
            journals=await _open_journals(config, run, recovered, newest),
            settings=ProcessSettings(
                tls=tls,
                peer_networks=config.link.networks,
                service=notifier(),
                make_gateway=make_gateway if config.gateway.enabled or work.rules.tinker else None,
                decode=await asyncio.to_thread(_decoder, config) if work.rules.tinker else None,
                viewers_see_samples=config.samples.viewers,
                facts=run_facts(config, work.tasks, work.cautions),
            ),
        )
        served = _served_models(config, work.rules)
        url = await _listen(
            stack,
            config.coordinator,
            coordinator,
            tls,
            served,
            serves_gateway=config.gateway.enabled,
        )
        await asyncio.to_thread(_tell_this_host, run, access, url)
        stack.push_async_callback(asyncio.to_thread, withdraw, run)
        log.info("listening url=%s run=%s run_dir=%s", url, run.run_id, run.path)
        seed = _seed_handover(config, run, access, url)
        audit = _audit_handover(config, run, access, url) if config.audit.enabled else None
        yield Opened(coordinator, url, seed, audit, run, access)


async def _open_files(
    config: CoordinatorConfig, run: RunDirectory, access: AccessTable, recovered: Recovered
) -> tuple[VersionFiles, Recovered]:
    """Open the published versions. Returns also what was recovered, with the versions that have lost their files and
    the workers that are convicted or trusted.
    """
    files = VersionFiles(
        run.path,
        config.run.snapshot_root,
        config.run.disk_bytes_max,
        base_model=config.run.base_model,
    )
    # A published version may have lost its files, and the core must not plan with such a version.
    lost = await asyncio.to_thread(
        files.prepare, {version.path: version.digest for version in recovered.published}
    )
    convicted, trusted = frozenset(access.convicted()), access.trusted()
    return files, replace(recovered, lost=lost, convicted=convicted, trusted=trusted)


@dataclass(frozen=True, slots=True)
class _Work:
    """The run's tasks, evaluations and rules. day: the day that chat templates see. cautions: shown to the operator."""

    tasks: Sequence[OpenTask]
    evals: Sequence[OpenEval]
    rules: RunRules
    day: str
    cautions: Sequence[str]


async def _open_work(
    stack: AsyncExitStack,
    config: CoordinatorConfig,
    run: RunDirectory,
    ledger: LedgerThread,
    recovered: Recovered,
) -> _Work:
    """Open the tasks, and check that the ledger's run can go on with them. OperatorFault: it cannot."""
    day = day_of(dict(recovered.facts))
    tasks = await open_tasks(stack, config, day=day)
    evals = await open_evals(stack, config, tasks, day=day)
    begun = begin_tasks([*tasks, *(each.asks for each in evals)], recovered.tasks)
    rules = await asyncio.to_thread(make_rules, config, run.run_id, tasks, evals)
    model = await asyncio.to_thread(model_facts, config.run.base_model)
    kept, odd = go_on(dict(recovered.facts), facts_of(config, rules, model, tasks, day))
    if begun or kept:
        await ledger.append([*begun, *kept])
    rules = replace(rules, seed_key=run.keys.seeds)
    _warn_of(rules)
    held_out = {each.asks.name: each.asks.pool.about.epoch_length for each in evals}
    cautions = [
        *config_cautions(config, model, held_out),
        *turn_end_cautions(tasks, rules),
    ]
    for caution in cautions:
        log.warning("%s", caution)
    return _Work(tasks, evals, rules, day, [*odd, *cautions])


async def _open_ledger(stack: AsyncExitStack, run: RunDirectory) -> tuple[LedgerThread, Recovered]:
    ledger = LedgerThread(run.path / LEDGER_FILE)
    stack.push_async_callback(ledger.close)
    recovered = await ledger.open()
    if recovered.facts:
        log.info(
            "goes on run=%s run_dir=%s epoch=%d committed_step=%d",
            run.run_id,
            run.path,
            recovered.epoch,
            max(recovered.checkpoint, *(each.step for each in recovered.committed), 0),
        )
    else:
        log.info("a new run begins run=%s run_dir=%s", run.run_id, run.path)
    return ledger, recovered


async def _open_journals(
    config: CoordinatorConfig,
    run: RunDirectory,
    recovered: Recovered,
    newest: VersionPublished | None,
) -> Journals:
    history = RunHistory(run.path)
    await asyncio.to_thread(history.recover)
    most, model = config.samples.bytes_max, config.run.base_model
    samples = None
    if most:
        samples = await asyncio.to_thread(open_sample_log, run.path, most, recovered.groups, model)
    audits = open_audit_log(run.path) if config.audit.enabled else None
    return Journals(history, samples, audits, newest)


def _call_log(config: CoordinatorConfig, run: RunDirectory) -> JsonLog | None:
    most = config.gateway.record_bytes_max
    return JsonLog(run.path, "gateway", most) if most else None


def make_rules(
    config: CoordinatorConfig,
    run_id: RunId,
    tasks: Sequence[OpenTask],
    evals: Sequence[OpenEval] = (),
) -> RunRules:
    """The rules that the core enforces, from the configuration, its tasks and the base model.

    OperatorFault: neither sampling.vocab_size nor the base model gives the vocabulary size.
    """
    policy, sampling, model = config.policy, config.sampling, config.run.base_model
    facts = model_facts(model)
    generation = None if model is None else _json_of(model / "generation_config.json", needed=False)
    ends = end_token_ids(facts, generation)
    told = {token for task in tasks for token in task.pool.about.stop_token_ids}
    if unused := set(end_token_ids(facts)) - {*ends, *told}:
        log.warning(
            "answers do not end at tokens %s: config.json calls them end tokens, generation_config.json "
            "and the task do not",
            sorted(unused),
        )
    return RunRules(
        run_id=run_id,
        **policy.values(),
        tasks=tuple(task_rules(config, task, ends) for task in tasks),
        evals=tuple(eval_rules(config, each, ends) for each in evals),
        vocab_size=sampling.vocab_size or _vocab_size(model, facts),
        experts=expert_numbers(facts) if EXPERTS in policy.columns else None,
        context_max=None if (fits := context_max(facts)) is None else fits - CONTEXT_SPARE,
        dissemination=config.dissemination,
        activation=config.activation,
        prices=tuple(prices_of(config, run_id)),
        seed_usd_per_gb_up=config.link.usd_per_gb_up,
        disk_bytes_max=config.run.disk_bytes_max,
        keep_every=config.run.keep_every,
        gateway=_gateway_rules(config),
        audit=_audit_rules(config) if config.audit.enabled else None,
        tinker=() if config.tinker is None else tuple(config.tinker.models),
        tinker_staleness_max=None if config.tinker is None else config.tinker.staleness_max,
        versions_held=1 if config.tinker is None else HELD_MAX,
    )


def _gateway_rules(config: CoordinatorConfig) -> GatewayRules | None:
    """With [tinker] all slots are for calls, and a sample waits for a worker as long as it takes."""
    if config.tinker is not None:
        return GatewayRules(1.0, SAMPLE_WAIT_S)
    if not config.gateway.enabled:
        return None
    return GatewayRules(config.gateway.share, config.gateway.wait_s)


def _decoder(config: CoordinatorConfig) -> Callable[[Sequence[int]], str]:
    """The text of token ids by the base model's tokenizer. Blocking."""
    assert config.run.base_model is not None, "the config is checked"
    tokenizer = ModelTexts(read_text_files(config.run.base_model)).tokenizer
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)


def _warn_of(rules: RunRules) -> None:
    """Log once what the operator may not know about the sampling of each task."""
    for task in rules.tasks:
        if not task.stop_token_ids:
            log.warning(
                "task %s: neither it nor the model names a stop token: no answer ends early",
                task.name,
            )
        if task.sampling.cuts:
            log.warning(
                "task %s samples with %s, but logprobs are those of the whole distribution: the learner "
                "takes the sampled tokens for less likely than they were; its ratios stay near 1",
                task.name,
                task.sampling,
            )


def _audit_rules(config: CoordinatorConfig) -> AuditRules:
    audit = config.audit
    samplings = sorted({str(drawn(config.sampling_of(task))) for task in config.tasks})
    experts = ", experts by layer" if EXPERTS in config.policy.columns else ""
    scored_as = f"{', or '.join(samplings)}, {audit.dtype} on {audit.device}{experts}"
    return AuditRules(**audit.values(), scored_as=scored_as)


def _vocab_size(model: Path | None, facts: Mapping[str, Any]) -> int:
    """The vocabulary size of the model whose config.json holds these facts."""
    assert model is not None, "the config is checked"
    size = vocab_size(facts)
    if size is None:
        raise OperatorFault(
            f"{model / 'config.json'}: vocab_size: expected a positive integer; "
            f"found {facts.get('vocab_size')!r}; set sampling.vocab_size"
        )
    return size


def model_facts(model: Path | None) -> dict[str, Any]:
    """The base model's config.json; empty: no base model is named. OperatorFault: it cannot be read."""
    return {} if model is None else _json_of(model / "config.json")


def _json_of(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """The object in a file of the base model. OperatorFault: it cannot be read."""
    if not (needed or path.exists()):
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OperatorFault(f"run.base_model: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise OperatorFault(f"run.base_model: {path} must hold a JSON object")
    return found


def _uses_tls(config: CoordinatorConfig) -> bool:
    """With "auto", TLS is on as soon as one listener is reachable from another host."""
    hosts = [host for host in (config.coordinator.host, config.link.host) if not is_loopback(host)]
    if config.coordinator.tls == "off" and hosts:
        log.warning("no_tls hosts=%s: %s", ",".join(hosts), GIVEN_UP)
    return config.coordinator.tls == "on" or (config.coordinator.tls == "auto" and bool(hosts))


def _check_link(link: LinkTable) -> None:
    """Check that link.host:link.port can be bound; OperatorFault if not.

    The seed process binds it later. Binding it once now reports a wrong address at the start.
    """
    if link.host in WILDCARDS:
        raise OperatorFault(
            "link.host: expected this host's address as workers reach it, which they can dial; "
            f"found {link.host!r}"
        )
    try:
        socket.create_server((link.host, link.port or 0), family=_family(link.host)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OperatorFault(f"link.port: {link.port} on {link.host} is in use") from error
        raise OperatorFault(
            f"link.host: cannot listen on {link.host}:{link.port}: {error.strerror}; expected an address "
            "of this host (link.host is coordinator.host unless it is set)"
        ) from error


def _make_snapshot_root(path: Path) -> None:
    """Make the directory in which the learner writes its versions. OperatorFault: it cannot be used."""
    expected = "expected a directory in which the learner can write its versions"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorFault(
            f"run.snapshot_root: cannot make {path}: {error.strerror}; {expected}"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OperatorFault(f"run.snapshot_root: cannot write in {path}; {expected}")


def _own_names() -> tuple[str, str]:
    """This machine's name, short and in full. Blocking: the full name may be looked up."""
    return socket.gethostname(), socket.getfqdn()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def _listen(
    stack: AsyncExitStack,
    serve: ServeTable,
    coordinator: CoordinatorProcess,
    tls: Tls | None,
    tinker: ServedModels | None,
    *,
    serves_gateway: bool,
) -> str:
    """Start serving. Returns the URL at which programs of this host reach the coordinator."""
    page = await asyncio.to_thread(read_page)
    app = make_app(
        coordinator,
        worker=coordinator.sessions.handle,
        page=page,
        gateway=coordinator.gateway if serves_gateway else None,
        tinker=tinker,
        names=(*serve.names, serve.host, *await asyncio.to_thread(_own_names)),
    )
    # Calls under way and closing links get this long when the coordinator stops.
    runner = make_runner(app, shutdown_timeout_s=2.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        await make_site(runner, serve.host, serve.port, tls).start()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OperatorFault(
                f"coordinator.port: {serve.port} on {serve.host} is in use"
            ) from error
        raise OperatorFault(
            f"cannot listen on {serve.host}:{serve.port}: {error.strerror or error}"
        ) from error
    # The configured port may be 0: the kernel chose one.
    port = runner.addresses[0][1]
    host = "127.0.0.1" if serve.host in WILDCARDS else serve.host
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _served_models(config: CoordinatorConfig, rules: RunRules) -> ServedModels | None:
    """What clients of the Tinker API are told. None: the run has tasks. OperatorFault: a package is missing."""
    if not rules.tinker:
        return None
    if importlib.util.find_spec("google.protobuf") is None:
        raise OperatorFault(f"[tinker] needs protobuf: {install_command('tinker')}")
    model = config.run.base_model
    assert model is not None, "the config is checked"
    facts = model_facts(model)
    generation = _json_of(model / "generation_config.json", needed=False)
    ends = end_token_ids(facts, generation)
    return ServedModels(rules.tinker, context_max(facts) or 0, rules.vocab_size, tuple(ends))


def _tell_this_host(run: RunDirectory, access: AccessTable, url: str) -> None:
    """Write this host's own token files and the address file into the run directory. Blocking."""
    own_token(run, access, "learner", url)
    own_token(run, access, "viewer", url)
    own_token(run, access, "operator", url)
    announce(run, url)


def _seed_handover(
    config: CoordinatorConfig, run: RunDirectory, access: AccessTable, url: str
) -> SeedHandover:
    key = _own_key(access, "seed")
    return SeedHandover.make(
        url,
        key,
        run=run,
        link_host=config.link.host,
        link_port=config.link.port or 0,
        disk_bytes_max=config.run.disk_bytes_max,
        uplink_limit=config.link.uplink_bytes_per_s_max,
    )


def _audit_handover(
    config: CoordinatorConfig, run: RunDirectory, access: AccessTable, url: str
) -> AuditHandover:
    audit, model = config.audit, config.run.base_model
    return AuditHandover.make(
        url,
        _own_key(access, "auditor"),
        run=run,
        device=audit.device,
        dtype=audit.dtype,
        base_model="" if model is None else str(model.absolute()),
        threads=audit.threads,
    )


def _own_key(access: AccessTable, role: Role) -> Ed25519PrivateKey:
    """The key of a child process: a fresh one, which no table on disk knows."""
    key = Ed25519PrivateKey.generate()
    access.admit_own(public_bytes(key), role)
    return key
