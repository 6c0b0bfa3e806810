"""One episode that an agent outside plays: its agent's calls on one side, the core's turns on the other.

    the core: StepEnvironment --> turn --> EnvironmentStepped or EpisodeEnded
                                   |          ^
                                answer     next call, or end
                                   v          |
    the agent:                   one HTTP call after the other

A call whose tokens go on from all tokens of the newest branch is its next turn; any other call begins a
branch. The same call again, as after a lost answer, gets the same answer again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgpack

from echo2d.core.base.ids import GroupId
from echo2d.core.protocol.trajectory import RewardPart
from echo2d.core.work.events import EnvironmentStepped, EpisodeEnded, StepEnvironment
from echo2d.net.gateway.agents import Say, asked, full, over

AgentEvent = EnvironmentStepped | EpisodeEnded


class AgentEpisode:
    """See the module docstring. room: whether a call with these given tokens may have an answer.

    nonce: that of its ticket; None: nobody has one.
    """

    def __init__(
        self,
        order: StepEnvironment,
        silence_s: float,
        room: Callable[[StepEnvironment, bytes, bool], bool],
    ) -> None:
        self.nonce: bytes | None = None
        # The messages of the last call: how many, and their hash.
        self.heard: tuple[int, bytes] = (0, b"")
        self.branches: Counter[str] = Counter()
        self.order = order
        if order.state is not None:
            self.nonce, count, digest = msgpack.unpackb(order.state)
            self.heard = count, digest
        self._silence_s, self._room = silence_s, room
        self._calls = asyncio.Lock()
        self._moved = asyncio.Event()
        self._reply: asyncio.Future[AgentEvent] | None = None
        self._patience: asyncio.Timeout | None = None
        self._over = self._kept = False

    # --- the core's side

    def arrived(self, order: StepEnvironment) -> None:
        """The core waits for the agent's answer to this turn."""
        self.order, self._reply = order, asyncio.get_running_loop().create_future()
        self._move()

    async def answer(self) -> AgentEvent:
        """What the agent makes of the turn. An agent that is silent for too long is given up."""
        order, reply = self.order, self._reply
        assert reply is not None
        try:
            async with asyncio.timeout(None) as self._patience:
                self._be_patient()
                return await reply
        except TimeoutError:
            reason = f"its agent was silent for {self._silence_s:g} s"
            return self._ended(order, None, reason, again=True)
        finally:
            self._patience = None

    def close(self, *, ended: bool) -> None:
        """Nobody goes on with this episode. ended: because its end is durable."""
        self._over, self._kept = True, ended
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(self._ended(self.order, None, "nobody goes on with it"))
        self._move()

    # --- the agent's side

    @property
    def at(self) -> tuple[GroupId, int]:
        return self.order.group, self.order.sample

    @property
    def is_offered(self) -> bool:
        """Whether an agent may take it."""
        return self.nonce is None and not self.order.turn and self._waits

    def claim(self, nonce: bytes) -> None:
        self.nonce = nonce
        self._be_patient()

    async def ask(self, say: Say) -> StepEnvironment:
        """Make a call; returns the turn that answers it. say: what it says, given the last turn.

        CallRefusal: the episode is over (410), or has no room (400). What `say` raises changes nothing.
        """
        async with self._calls:
            order = await self._at_turn()
            spoken = await say(order, self.heard)
            # It may have been given up while the call was read.
            await self._at_turn()
            so_far = order.prompt + order.output.branch
            if order.turn and spoken.tokens == asked(order):
                return order
            given, anew = spoken.tokens[len(so_far) :], False
            if not order.turn or not given or not spoken.tokens.startswith(so_far):
                given, anew = spoken.tokens[len(order.prompt) :], order.turn > 0
            if not self._room(order, given, anew):
                raise full()
            if anew:
                self.branches[spoken.branch or "tokens"] += 1
            self.heard = spoken.messages, spoken.digest
            state = msgpack.packb([self.nonce, *self.heard])
            at = order.group, order.sample, order.begun, order.turn
            self._tell(EnvironmentStepped(*at, given, state, anew))
            return await self._at_turn()

    async def finish(
        self, reward: float | None, reason: str, parts: tuple[RewardPart, ...]
    ) -> None:
        """End it, and wait until that is durable. reward None: it failed, for this reason.

        CallRefusal: it is over already, or was given up meanwhile (410).
        """
        async with self._calls:
            order = await self._at_turn()
            again = not order.turn
            self._tell(self._ended(order, reward, reason, parts, again=again))
            while not self._over:
                await self._moved.wait()
            # An episode without a turn begins anew for another agent; nothing of it is kept.
            if not self._kept and not again:
                raise over()

    # --- inside

    @property
    def _waits(self) -> bool:
        """Whether the core waits for the agent."""
        return self._reply is not None and not self._reply.done()

    async def _at_turn(self) -> StepEnvironment:
        """The turn, once the core waits for the agent."""
        while not self._waits:
            if self._over:
                raise over()
            await self._moved.wait()
        if self._over:
            raise over()
        return self.order

    def _tell(self, event: AgentEvent) -> None:
        assert self._reply is not None
        self._reply.set_result(event)

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    def _be_patient(self) -> None:
        """The agent has been heard of. One that nobody plays waits for ever."""
        if self._patience is not None and self.nonce is not None:
            now = asyncio.get_running_loop().time()
            self._patience.reschedule(now + self._silence_s)

    def _ended(
        self,
        order: StepEnvironment,
        reward: float | None,
        reason: str,
        parts: Sequence[RewardPart] = (),
        *,
        again: bool = False,
    ) -> EpisodeEnded:
        at = order.group, order.sample, order.begun, order.turn
        return EpisodeEnded(*at, reward, reason, tuple(parts), again)
