"""Orders to a real coordinator about scripted workers."""

import asyncio
import time
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo2d.client import AsyncCoordinator
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.core.base.ids import PeerId, SessionId
from echo2d.core.cluster.events import PeerConnected, PeerSaid
from echo2d.core.coordinator.events import Recovered
from echo2d.core.coordinator.state import PLAN_SECRET_BYTES, CoordinatorState
from echo2d.core.protocol.control_messages import Goodbye
from echo2d.core.rules.run import RunRules
from echo2d.errors import OperatorFault
from echo2d.net.http import costly_answer
from echo2d.net.security.auth import enrol_proof, public_bytes
from echo2d.runtime.coordinator.main import Opened
from echo2d.runtime.run_dir.run_directory import find_coordinator
from echo2d.views import orders
from echo2d.views.orders import drain_and_wait, give_orders
from echo2d_lab.standins.memory_run import FakePeer
from tests.support.scripted_core import config, serving  # noqa: F401 - a fixture

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(3)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A status is made for each call, also on a machine on which it takes long."""
    monkeypatch.setattr(costly_answer, "ANSWER_SHARE_MAX", 1e9)


@pytest.fixture
def costly(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status is as old as that of a thousand workers may be."""
    monkeypatch.setattr(costly_answer, "ANSWER_SHARE_MAX", 1e-2)
    defaults = costly_answer.CostlyAnswer.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "cheap_s", 0.0)


def machine(rules: RunRules, recovered: Recovered) -> CoordinatorState:
    secret = bytes(PLAN_SECRET_BYTES)
    return CoordinatorState(rules, recovered, plan_secret=secret, now=time.monotonic())


async def join(opened: Opened, number: int, name: str) -> PeerId:
    """Enrol a worker and let it say hello."""
    key = KEYS[number]

    def enrol() -> PeerId:
        secret = opened.access.create(f"token-{number}", "worker").secret
        proof = enrol_proof(key, secret)
        return opened.access.enrol(secret, public_bytes(key), proof, now_s=time.time())

    peer = await asyncio.to_thread(enrol)
    hello = FakePeer(name, "worker", 2, SessionId(0)).hello()
    await opened.coordinator._mailbox.put(PeerConnected(SessionId(900 + number), peer, hello))
    return peer


async def test_workers_are_found_by_name_and_by_the_beginning_of_their_id(
    config: CoordinatorConfig,  # noqa: F811
) -> None:
    run_dir = config.run.run_dir
    async with serving(config, machine) as opened:
        find = partial(find_coordinator, run_dir, "operator")
        with pytest.raises(OperatorFault, match="no worker is connected"):
            await give_orders(find, (), everyone=True, order="cordon")
        ids = [await join(opened, n, name) for n, name in enumerate(("a", "twin", "twin"))]

        async def ordered(*names: str, order: str = "cordon") -> list[str]:
            answers = await give_orders(find, names, everyone=not names, order=order)
            return [each["id"] for each in answers]

        assert await ordered("a") == [ids[0]]
        assert await ordered(ids[1][:8], ids[2]) == ids[1:]
        assert await ordered(order="uncordon") == ids
        for names, words in (
            (("twin",), "2 workers are named twin; name one by its id: "),
            (("b",), "no worker is named b, and no id begins so; there are: a, twin, twin"),
            (("0" * 32,), "no worker with id 0"),
        ):
            with pytest.raises(OperatorFault, match=words):
                await ordered(*names)
        with pytest.raises(OperatorFault, match="expected the names of workers, or --all"):
            await give_orders(find, ("a",), everyone=True, order="cordon")
        viewer = partial(find_coordinator, run_dir)
        with pytest.raises(OperatorFault, match="has the role viewer; this needs operator"):
            await give_orders(viewer, ("a",), everyone=False, order="cordon")


async def test_a_drain_waits_until_its_worker_has_ended(
    config: CoordinatorConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orders, "_LOOK_S", 0.001)
    told, heard = list[str](), asyncio.Event()

    def tell(line: str) -> None:
        told.append(line)
        heard.set()

    async with serving(config, machine) as opened:
        find = partial(find_coordinator, config.run.run_dir, "operator")
        await join(opened, 0, "stays")
        peer = await join(opened, 1, "goes")

        async def ends() -> None:
            await heard.wait()
            await opened.coordinator._mailbox.put(PeerSaid(SessionId(901), Goodbye("drained")))

        ending = asyncio.ensure_future(ends())
        outcomes = await drain_and_wait(find, ("goes",), everyone=False, within_s=0.0, tell=tell)
        await ending
        assert outcomes == [{"id": peer, "name": "goes", "outcome": "ended"}]
        assert told == ["goes: holds nothing, and is told to end", "goes: ended"]
        states = {each.name: each.state for each in opened.coordinator.look().workers}
        assert states == {"stays": "joined", "goes": "gone"}


async def test_a_drain_that_is_cancelled_elsewhere_ends_the_waiting(
    config: CoordinatorConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orders, "_LOOK_S", 0.001)
    told, heard = list[str](), asyncio.Event()

    def tell(line: str) -> None:
        told.append(line)
        heard.set()

    async with serving(config, machine) as opened:
        find = partial(find_coordinator, config.run.run_dir, "operator")
        await join(opened, 0, "a")

        async def calls_off() -> None:
            await heard.wait()
            await give_orders(find, ("a",), everyone=False, order="uncordon")

        calling = asyncio.ensure_future(calls_off())
        [outcome] = await drain_and_wait(find, (), everyone=True, within_s=None, tell=tell)
        await calling
        assert outcome["outcome"] == "called off"


@pytest.mark.usefixtures("costly")
async def test_a_drain_seen_after_a_status_is_not_taken_for_cancelled(
    config: CoordinatorConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The status that anybody had looked at just before does not know of the drain yet."""
    monkeypatch.setattr(orders, "_LOOK_S", 0.001)
    async with serving(config, machine) as opened:
        find = partial(find_coordinator, config.run.run_dir, "operator")
        await join(opened, 0, "a")
        url, token_file = await asyncio.to_thread(find)
        for _ in range(20):
            told, heard = list[str](), asyncio.Event()

            def tell(line: str, told: list[str] = told, heard: asyncio.Event = heard) -> None:
                told.append(line)
                heard.set()

            async with AsyncCoordinator(url, token_file=token_file) as client:
                await client.status()
            draining = asyncio.ensure_future(
                drain_and_wait(find, ("a",), everyone=False, within_s=None, tell=tell)
            )
            await heard.wait()
            assert told == ["a: holds nothing, and is told to end"]
            await give_orders(find, ("a",), everyone=False, order="uncordon")
            [outcome] = await draining
            assert outcome["outcome"] == "called off"


def test_an_order_without_a_coordinator_gives_one_line(tmp_path: Path) -> None:
    with pytest.raises(OperatorFault, match="no coordinator runs in"):
        asyncio.run(
            give_orders(partial(find_coordinator, tmp_path), ("a",), everyone=False, order="drain")
        )
