"""Joins the run for a moment as a relay peer that passes nothing on, to try the ports in both directions.

    enrol --> hello --> the coordinator dials back: DialledBack --> goodbye
                   +--> if there is a version, PlanEdges name its sources --> dial them, hang up

The worker's own key is used, so the token counts this host once.
"""

import asyncio
import contextlib
import random
import secrets
import socket
from dataclasses import dataclass, field

from echo2d.config.worker import WorkerConfig
from echo2d.core.base.ids import PeerId
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    Address,
    DialledBack,
    Goodbye,
    Heartbeat,
    Hello,
    PlanEdges,
    ToPeer,
    Welcome,
)
from echo2d.core.protocol.peer_handshake import DIAL_BACK, SECRET_BYTES
from echo2d.errors import OperatorFault, PeerFault
from echo2d.net.control.client import ControlLink, Identity, enrol
from echo2d.net.peer.links import PeerLinks
from echo2d.net.security.auth import TokenFile
from echo2d.runtime.doctor.finding import HostFinding, error, ok, skipped, warning

# The coordinator dials back within DIAL_BACK_S, and sends a plan to a newcomer at once.
TRIAL_S_MAX = 15.0
# After the dial has ended, the trial waits this long for a plan.
PLAN_S_MAX = 2.0
# A source is dialled repeatedly for this long, because it may not have its part of the plan yet.
_DIAL_S_MAX = 5.0
DIAL_AGAIN_S = 0.25
_GOODBYE_S = 2.0


@dataclass(slots=True)
class _Trial:
    """The owner of the control link."""

    config: WorkerConfig
    identity: Identity
    address: Address
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))
    dialled: asyncio.Future[str] = field(default_factory=asyncio.Future)
    plan: asyncio.Future[PlanEdges] = field(default_factory=asyncio.Future)

    def hello(self) -> Hello:
        return Hello(
            build=OURS,
            run_id=self.identity.run_id,
            kind="relay",
            name=self.config.name or socket.gethostname(),
            boot_id=secrets.token_hex(8),
            slots=0,
            listen=self.address,
            serving=None,
            holding=(),
            leases=(),
            forms=(),
            receive_only=True,
            dial_back_secret=self.secret,
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(0)

    async def connected(self, welcome: Welcome) -> None:
        pass

    async def received(self, message: ToPeer) -> None:
        match message:
            case DialledBack(fault) if not self.dialled.done():
                self.dialled.set_result(fault)
            case PlanEdges() if not self.plan.done():
                self.plan.set_result(message)
            case _:
                pass

    async def disconnected(self, reason: str) -> None:
        pass


async def try_ports(
    config: WorkerConfig, token: TokenFile, identity: Identity, rng: random.Random
) -> list[HostFinding]:
    """Findings about this host's port, and about those of the peers that have a version."""
    links = PeerLinks(
        run_id=identity.run_id,
        me=identity.peer,
        on_event=lambda *_: None,
        on_ready=lambda _: None,
        tls=identity.tls,
    )
    try:
        host, port = await links.listen(config.listen_host, config.listen_port)
    except OSError as fault:
        at = f"{config.listen_host}:{config.listen_port}"
        todo = "set --listen-host to an address of this host, and --listen-port to a free port"
        return [error("own port", f"cannot listen on {at}: {fault.strerror}", todo)]
    try:
        await enrol(config.url, token, identity, rng=rng, patience_s=0.0)
        trial = _Trial(config, identity, Address(*(config.announced or (host, port))))
        links.expect(DIAL_BACK, trial.secret)
        return await _joined(trial, links, rng)
    except OperatorFault as fault:
        return [error("join", str(fault), "do what the coordinator says, then try again")]
    finally:
        await links.close("the doctor leaves")


async def _joined(trial: _Trial, links: PeerLinks, rng: random.Random) -> list[HostFinding]:
    control = ControlLink(trial.config.url, trial.identity, trial, rng=rng)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(_run(control))
        try:
            async with asyncio.timeout(TRIAL_S_MAX):
                await asyncio.wait({trial.dialled, running}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return [error("join", running.result(), "do what it says, then try again")]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PLAN_S_MAX):
                    await asyncio.wait({trial.plan})
            plan = trial.plan.result() if trial.plan.done() else None
            return [_own_port(trial), *await sources(plan, links)]
        except TimeoutError:
            text = f"the coordinator did not dial back within {TRIAL_S_MAX:.0f} s"
            return [warning("own port", text, "try again; if it stays so, look at its log")]
        finally:
            control.send(Goodbye("the doctor leaves"))
            control.leave()
            await asyncio.wait({running}, timeout=_GOODBYE_S)
            running.cancel()


async def _run(control: ControlLink) -> str:
    """Run the link until cancelled; returns why the coordinator refuses this peer for good."""
    try:
        await control.run()
    except OperatorFault as fault:
        return str(fault)
    return "the link has ended"


def _own_port(trial: _Trial) -> HostFinding:
    at, fault = f"{trial.address.host}:{trial.address.port}", trial.dialled.result()
    if not fault:
        return ok("own port", f"the coordinator dials this host at {at}")
    return warning(
        "own port",
        f"no peer can dial this host ({fault}); it dials the others, and they use its uplink less",
        "open the port if you can: --listen-host, --listen-port, --advertise "
        "(docs/guide/operating.md, Who can be dialled)",
    )


async def sources(plan: PlanEdges | None, links: PeerLinks) -> list[HostFinding]:
    """The ports of the peers from which this host would get the newest version."""
    if plan is None:
        return [skipped("sources", "no version is there yet, so no port of a seed could be tried")]
    found = []
    dials = [peer for peer in plan.peers if peer.dial and peer.address is not None]
    # At most four sources are dialled: the seed, and others of a wide plan.
    for peer in dials[:4]:
        assert peer.address is not None
        at = f"{peer.address.host}:{peer.address.port}"
        links.expect(peer.peer, peer.secret)
        fault = await _dial(links, peer.peer, peer.address)
        if fault:
            todo = f"let this host reach TCP port {peer.address.port} of {peer.address.host}"
            found.append(error("sources", f"versions come from {at}: {fault}", todo))
        else:
            found.append(ok("sources", f"{at} sends versions, and can be dialled"))
    return found or [skipped("sources", "the sources of versions dial this host")]


async def _dial(links: PeerLinks, peer: PeerId, address: Address) -> str:
    """Why this peer cannot be dialled. Empty: it can. Dial it repeatedly, because it may not have its plan yet."""
    deadline = asyncio.get_running_loop().time() + _DIAL_S_MAX
    while True:
        try:
            await links.dial(peer, address.host, address.port)
        except PeerFault as fault:
            if asyncio.get_running_loop().time() > deadline:
                return str(fault)
            await asyncio.sleep(DIAL_AGAIN_S)
        else:
            return ""
