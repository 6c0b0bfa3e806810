import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from echo2d.errors import OperatorFault
from echo2d.runtime.envs import playing
from echo2d.runtime.envs.gateway_link import GatewayLink
from echo2d.runtime.envs.playing import EpisodeWorkers, PlayedTotals
from echo2d.runtime.envs.ticket_endpoint import TicketEndpoint
from echo2d.runtime.envs.tickets import EpisodeOutcome, PlayerTicket, TraceBranch
from tests.support.ticket_gateway import TicketGateway, token_file

HANG_S = 30.0
Play = Callable[[PlayerTicket], Awaitable[EpisodeOutcome]]


class Player:
    def __init__(self, play: Play) -> None:
        self._play = play

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def play(self, ticket: PlayerTicket, bind: Callable[[str], None]) -> EpisodeOutcome:
        return await self._play(ticket)


async def rewarded(ticket: PlayerTicket) -> EpisodeOutcome:
    return EpisodeOutcome(float(ticket.row), {"turns": 4.0}, [TraceBranch([1, 2, 3], [(1, 3)])])


async def forever(ticket: PlayerTicket) -> EpisodeOutcome:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


async def played(
    gateway: TicketGateway, play: Play, until: Callable[[], bool], workers: int = 2
) -> PlayedTotals:
    """Play until the condition holds, then stop in order; returns the last totals."""
    shown = list[PlayedTotals]()
    async with GatewayLink(gateway.url, token_file()) as link, TicketEndpoint(link) as endpoint:
        made = EpisodeWorkers(link, endpoint, Player(play), task="sums", show=shown.append)
        async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(made.run(workers))
            while not until() and not running.done():  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.005)
            made.stop("SIGTERM")
            made.stop("SIGTERM")
    return shown[-1]


async def test_rewards_and_traces_reach_the_gateway() -> None:
    async with TicketGateway().serving() as gateway:
        gateway.add(1, 2, 3)
        totals = await played(gateway, rewarded, lambda: len(gateway.ends) == 3)
    assert gateway.ends["t2"] == {
        "reward": 2.0,
        "parts": {"turns": 4.0},
        "trace": [{"token_ids": [1, 2, 3], "written": [[1, 3]]}],
    }
    assert (totals.episodes, totals.reward_mean, totals.errors) == (3, 2.0, 0)
    assert totals.line().startswith("episodes 3  mean reward 2.000")
    assert totals.fields()["reward_mean"] == 2.0


async def test_an_environment_that_raises_ends_its_own_episode_with_an_error() -> None:
    async def odd_ones_raise(ticket: PlayerTicket) -> EpisodeOutcome:
        if ticket.row % 2:
            raise ValueError("a bug\nof two lines")
        return await rewarded(ticket)

    async with TicketGateway().serving() as gateway:
        gateway.add(1, 2)
        totals = await played(gateway, odd_ones_raise, lambda: len(gateway.ends) == 2)
    assert gateway.ends["t1"] == {"error": "ValueError: a bug of two lines"}
    assert gateway.ends["t2"]["reward"] == 2.0
    assert (totals.episodes, totals.errors) == (1, 1)


async def test_a_reward_that_is_no_number_is_an_error() -> None:
    async def nan(ticket: PlayerTicket) -> EpisodeOutcome:
        return EpisodeOutcome(float("nan"))

    async with TicketGateway().serving() as gateway:
        gateway.add(1)
        await played(gateway, nan, lambda: len(gateway.ends) == 1)
    assert "not a finite number" in gateway.ends["t1"]["error"]


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        ((410, {"error": {"message": "expired"}}), "dropped"),
        ((503, {"error": {"message": "not known yet"}}), "dropped"),
        ((409, {"error": {"message": "another end"}}), "refused"),
        ((200, {"ended": True, "differs": "branch 0: token 3"}), "refused"),
    ],
)
async def test_an_episode_end_that_the_gateway_rejects_is_counted_separately(
    answer: tuple[int, dict[str, object]], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(playing, "LAST_S_MAX", 0.3)
    async with TicketGateway(end_answer=answer).serving() as gateway:
        gateway.add(1)
        totals = await played(gateway, rewarded, lambda: len(gateway.ends) == 1)
    assert (getattr(totals, field), totals.episodes) == (1, 0)


async def test_running_episodes_end_with_an_error_when_the_player_is_stopped() -> None:
    begun = list[int]()

    async def hangs(ticket: PlayerTicket) -> EpisodeOutcome:
        begun.append(ticket.row)
        return await forever(ticket)

    async with TicketGateway().serving() as gateway:
        gateway.add(1, 2)
        totals = await played(gateway, hangs, lambda: len(begun) == 2)
    assert {tuple(end) for end in gateway.ends.values()} == {("error",)}
    assert (len(gateway.ends), totals.errors) == (2, 2)


async def test_a_hanging_environment_delays_no_other_episode() -> None:
    async def first_hangs(ticket: PlayerTicket) -> EpisodeOutcome:
        return await (forever if ticket.row == 1 else rewarded)(ticket)

    async with TicketGateway().serving() as gateway:
        gateway.add(1, 2, 3, 4)
        await played(gateway, first_hangs, lambda: {"t2", "t3", "t4"} <= set(gateway.ends))
    assert gateway.ends["t4"]["reward"] == 4.0


@pytest.mark.parametrize(("status", "said"), [(404, "no tickets"), (400, "no ticket: 400: no")])
async def test_a_gateway_that_will_never_give_a_ticket_ends_the_program(
    status: int, said: str
) -> None:
    async with TicketGateway().serving() as gateway:
        gateway.refusals.append((status, {}))
        with pytest.RaisesGroup(pytest.RaisesGroup(pytest.RaisesExc(OperatorFault, match=said))):
            await played(gateway, rewarded, lambda: False, workers=1)
