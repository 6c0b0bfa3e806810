"""How the coordinator's shell treats peers, around a scripted core: enrolment, messages to them, revocation."""

import asyncio
import random
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.audit.events import Convict
from echo2d.core.base.ids import Epoch, PeerId, PublishSeq
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import (
    CloseSession,
    PeerConnected,
    PeerDisconnected,
    PeerPardoned,
    PeerRevoked,
    Send,
)
from echo2d.core.coordinator.events import CoordinatorAction
from echo2d.core.protocol.control_messages import Drain, SignedRoot, Welcome
from echo2d.errors import OperatorFault
from echo2d.net.control.client import ControlLink, Identity, enrol
from echo2d.net.security.auth import TokenFile, read_token_file, verify_root
from echo2d.runtime.coordinator import access_watch
from echo2d.runtime.run_dir.access_table import AccessTable
from echo2d.runtime.run_dir.run_directory import RunDirectory
from echo2d.runtime.run_dir.tokens import (
    delete_token,
    extend_token,
    list_tokens,
    revoke_token,
)
from tests.support.control_link import Owner, enrolled, worker_token
from tests.support.polling import poll
from tests.support.scripted_core import (
    Script,
    config,
    run_dir,
    script,
    serving,
)

__all__ = ["config", "run_dir", "script"]


@pytest.fixture
def fast_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_watch, "ACCESS_RELOAD_S", 0.05)


@pytest.mark.usefixtures("fast_reload")
async def test_a_worker_enrols_and_gets_messages_until_it_is_revoked(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    assert config.coordinator.host == "127.0.0.1"

    def connected(event: PeerConnected) -> list[CoordinatorAction]:
        assert script.rules is not None
        welcome = Welcome(event.peer, script.rules.run_id, Epoch(1), PublishSeq(0), 60.0, (), ())
        return [
            Send(event.session, welcome),
            SendRoot((event.session,), b"root"),
            Send(event.session, Drain("x")),
        ]

    script.on[PeerConnected] = connected
    async with serving(config, script.make) as opened:
        identity, owner = await enrolled(run_dir, opened.url), Owner()
        link = ControlLink(opened.url, identity, owner, rng=random.Random(1))
        with pytest.raises(BaseExceptionGroup) as caught:
            await follow(link, script, owner, identity, run_dir)
        assert caught.group_contains(OperatorFault, match="was revoked")


async def follow(
    link: ControlLink, script: Script, owner: Owner, identity: Identity, run_dir: Path
) -> None:
    """Runs the link until it gives up, having been welcomed and revoked."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        assert isinstance(await owner.heard.get(), Welcome)
        root = await owner.heard.get()
        assert isinstance(root, SignedRoot)
        verify_root(identity.run_key, root.root, root.signature)
        assert await owner.heard.get() == Drain("x")
        joined = await script.hears(PeerConnected)
        script.on[PeerRevoked] = lambda event: [CloseSession(joined.session)]
        await asyncio.to_thread(revoke_token, run_dir, "box")
        assert await script.hears(PeerRevoked) == PeerRevoked(identity.peer)
        assert await script.hears(PeerDisconnected) == PeerDisconnected(joined.session, "closed")


@pytest.mark.usefixtures("fast_reload")
async def test_a_member_stays_when_its_token_expires_and_leaves_when_it_is_deleted(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    async with serving(config, script.make) as opened:
        identity, owner = await enrolled(run_dir, opened.url), Owner()
        token = await asyncio.to_thread(read_token_file, run_dir / "box.token")
        link = ControlLink(opened.url, identity, owner, rng=random.Random(1))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(link.run())
            first = await script.hears(PeerConnected)
            await asyncio.to_thread(extend_token, run_dir, "box", "0s")
            # The same machine, started again: the table was reread since the token expired.
            await enrol(opened.url, token, identity, rng=random.Random(1), patience_s=1.0)
            again = tasks.create_task(
                ControlLink(opened.url, identity, Owner(), rng=random.Random(2)).run()
            )
            assert (await script.hears(PeerConnected)).peer == first.peer == identity.peer
            stranger = Identity.of(opened.url, token, Ed25519PrivateKey.generate())
            with pytest.raises(OperatorFault, match="token box has expired and enrols no new"):
                await enrol(opened.url, token, stranger, rng=random.Random(1), patience_s=1.0)
            await asyncio.to_thread(delete_token, run_dir, "box")
            assert await script.hears(PeerRevoked) == PeerRevoked(identity.peer)
            running.cancel()
            again.cancel()


async def test_a_pardon_reaches_the_core_however_soon_it_is_given(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    """Also if conviction and pardon lie between two looks at the access table, a second apart."""
    script.on[PeerConnected] = lambda event: [Convict(event.peer, "a lie")]
    async with serving(config, script.make) as opened:
        identity, owner = await enrolled(run_dir, opened.url), Owner()
        link = ControlLink(opened.url, identity, owner, rng=random.Random(1))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(link.run())
            await script.hears(PeerConnected)
            await asyncio.to_thread(pardon_when_convicted, run_dir, identity.peer)
            assert await script.hears(PeerPardoned) == PeerPardoned(identity.peer)
            running.cancel()


def pardon_when_convicted(run_dir: Path, peer: PeerId) -> None:
    table = AccessTable(RunDirectory(run_dir))

    def convicted() -> bool:
        table.reload()
        return peer in table.convicted()

    poll(convicted, interval_s=0.01)
    table.pardon(peer)


@pytest.mark.usefixtures("fast_reload")
async def test_enrolment_is_refused_in_one_line(
    config: CoordinatorConfig, script: Script, run_dir: Path
) -> None:
    async with serving(config, script.make) as opened:
        token = await asyncio.to_thread(worker_token, run_dir, opened.url)
        identity = Identity.of(opened.url, token, Ed25519PrivateKey.generate())
        wrong = TokenFile("box", "worker", "wrong", token.run_key)
        for url, given, words in [
            (opened.url, wrong, "unknown credential"),
            (opened.url + "/elsewhere", token, "refused to enrol"),
            ("http://127.0.0.1:1", token, "cannot reach the coordinator"),
            ("nonsense", token, "nonsense"),
        ]:
            with pytest.raises(OperatorFault, match=words):
                await enrol(url, given, identity, rng=random.Random(1), patience_s=0.0)
    rows = await asyncio.to_thread(list_tokens, run_dir)
    assert [(row["name"], row["state"]) for row in rows] == [
        (n, "valid") for n in ("box", "own-learner", "own-operator", "own-viewer")
    ]
    assert 3590 < rows[0]["expires_in_s"] <= 3600
