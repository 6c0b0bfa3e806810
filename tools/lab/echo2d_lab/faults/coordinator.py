"""Simulates the coordinator's process around the real CoordinatorState, with a death at any moment.

    mailbox --(a turn: up to 256 events)--> handle --> one transaction of all Persist actions
                                                   --> the other actions, in order

The process may die before the transaction, or between it and any of the actions. Then the next
process starts from the ledger alone, and the remaining actions never happen. Prompts and rewards
come from a simulated task that lives and dies with the process.

Not here: the rules that a run must keep (`invariants`).
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Literal, assert_never

from echo2d.core.audit.events import AuditTold, Convict
from echo2d.core.base.ids import PeerId, RequestId, SessionId
from echo2d.core.broadcast.events import SendRoot
from echo2d.core.cluster.events import (
    CloseSession,
    DeleteVersion,
    DialBack,
    DialBackEnded,
    Note,
    PeerRevoked,
    Persist,
    Reply,
    Send,
    StopRun,
    SyncVersion,
)
from echo2d.core.cluster.reachability import DIAL_BACK_S
from echo2d.core.coordinator.events import (
    CoordinatorAction,
    CoordinatorEvent,
    DeadlinePassed,
    RequestGone,
)
from echo2d.core.coordinator.state import PLAN_SECRET_BYTES, CoordinatorState
from echo2d.core.protocol.control_messages import (
    HeldLease,
    LeaseGranted,
    Refused,
    SignedRoot,
    ToPeer,
)
from echo2d.core.protocol.trajectory import Source, pack_tokens
from echo2d.core.rules.run import RunRules
from echo2d.core.tinker.events import DrawSample, GiveOperation, StopSample
from echo2d.core.work.calls.events import CallRefused, ChoiceGrew
from echo2d.core.work.events import (
    DrawPrompt,
    ForgetEpisode,
    ProbeRewards,
    PromptDrawn,
    RewardsProbed,
    SampleScored,
    ScoreSample,
    StepEnvironment,
)
from echo2d.plan.kernel.virtual_clock import Clock
from echo2d_lab.faults.control_links import Control
from echo2d_lab.faults.environment import ModelEnvironment
from echo2d_lab.faults.invariants import InvariantChecker, reward_of
from echo2d_lab.faults.process import Process
from echo2d_lab.faults.worker import Noted

# Rows of each task; prompts use them in turn.
ROWS = 7
NUMBER = -1  # this process's number in traces
TURN_EVENTS_MAX = 256
COMMIT_S = (0.001, 0.02)
LONG_POLL_S = 30.0
CALL_S = 0.005  # one way between learner and coordinator
CHECK_EVERY = 16  # turns between two checks of the state's invariants
Death = Literal["before", "after", "between"]
OnReply = Callable[[Reply | None], None]  # None: the connection broke


class SimCoordinator(Process):
    """See the module docstring.

    rewards_fail: this many of the next rewards fail. die: the place in the next turn with a transaction
    where the process dies; None: it does not die.
    """

    def __init__(
        self,
        clock: Clock,
        chance: random.Random,
        rules: RunRules,
        judge: InvariantChecker,
        noted: Noted,
        granted: list[LeaseGranted],
        died: Callable[[], None],
    ) -> None:
        super().__init__(clock)
        self._random, self._rules, self._judge, self._noted, self._died = (
            chance,
            rules,
            judge,
            noted,
            died,
        )
        self._granted = granted
        self.control: Control
        self.rewards_fail = 0
        self.die: Death | None = None
        self._mailbox: deque[CoordinatorEvent] = deque()
        self._busy = False
        self._calls: dict[RequestId, OnReply] = {}
        self._requests = 0
        self._turns = 0
        # Peers whose credential is revoked, as far as this process knows.
        self._barred: list[PeerId] = []
        # The environment outlives this process, because tools have effects outside it.
        self._environment = ModelEnvironment()

    def start(self) -> None:
        self.begin(skew_s=self._random.uniform(0.0, 1e5))
        self._judge.restarted()
        self._environment.restarted()
        secret = self._random.randbytes(PLAN_SECRET_BYTES)
        self.state = CoordinatorState(
            self._rules, self._judge.ledger.recover(), plan_secret=secret, now=self.now
        )
        self.state.check()
        self._judge.compare(self.state)
        self.set_alarm()

    def end(self) -> None:
        super().end()
        self._mailbox.clear()
        self._busy, self.die = False, None
        self.control.coordinator_died()
        calls, self._calls = self._calls, {}
        for answered in calls.values():
            answered(None)

    # --- events

    def emit(self, event: CoordinatorEvent) -> None:
        if self.up:
            self._mailbox.append(event)
            self._turn_soon()

    def wake_at(self) -> float | None:
        return None if self._busy else self.state.wake_at()

    def woken(self) -> None:
        self._turn_soon()

    def ask(
        self,
        make: Callable[[RequestId], CoordinatorEvent],
        answered: OnReply,
        *,
        after_s: float = CALL_S,
    ) -> None:
        """Make a call of the learner.

        It becomes an event after `after_s`, even if the caller is gone by then.
        """
        if not self.up:
            answered(None)
            return
        self._requests += 1
        request = RequestId(self._requests)
        self._calls[request] = answered
        event = make(request)
        self._judge.asked(request, event)
        self.later(after_s, self.emit, event)
        self.later(LONG_POLL_S, self._poll_ended, request)

    def lose_calls(self) -> None:
        """Break the connections of all waiting calls."""
        for request in list(self._calls):
            answered = self._calls.pop(request)
            self.emit(RequestGone(request))
            answered(None)

    def _poll_ended(self, request: RequestId) -> None:
        answered = self._calls.pop(request, None)
        if answered is not None:
            self.emit(RequestGone(request))
            answered(Reply(request, 204, {}))

    # --- turns

    def _turn_soon(self) -> None:
        if not self._busy:
            self._busy = True
            self.later(0.0, self._turn)

    def _turn(self) -> None:
        wake_at = self.state.wake_at()
        events = [self._mailbox.popleft() for _ in range(min(len(self._mailbox), TURN_EVENTS_MAX))]
        if wake_at is not None and self.now >= wake_at:
            events.append(DeadlinePassed())
        actions = [action for event in events for action in self._handle(event)]
        self._turns += 1
        if self._turns % CHECK_EVERY == 0:
            self.state.check()
        if any(isinstance(action, Persist) for action in actions):
            self.later(self._random.uniform(*COMMIT_S), self._commit, actions)
        else:
            self._perform_all(actions)

    def _handle(self, event: CoordinatorEvent) -> list[CoordinatorAction]:
        actions = self.state.handle(event, now=self.now)
        self._noted(NUMBER, event, len(actions))
        if isinstance(event, PeerRevoked):
            self._barred.append(event.peer)
        return actions

    def _commit(self, actions: list[CoordinatorAction]) -> None:
        if self.die == "before":
            self._died()
            return
        for action in actions:
            if isinstance(action, Persist):
                self._judge.persist(action.record)
                self._environment.heard(action.record)
            elif isinstance(action, Convict):
                # The worker's groups are dropped in the same turn, before any other action.
                self._judge.convicts(action.worker)
        if self._turns % CHECK_EVERY == 0:
            self._judge.compare(self.state)
        if self.die is not None:
            # Some actions may still have happened before the process died.
            survivors = self._random.randint(0, len(actions)) if self.die == "between" else 0
            for action in actions[:survivors]:
                self._perform(action)
            self._died()
            return
        self._perform_all(actions)

    def _perform_all(self, actions: list[CoordinatorAction]) -> None:
        for action in actions:
            self._perform(action)
        self._judge.barred.update(self._barred)
        self._busy = False
        if self._mailbox:
            self._turn_soon()
        else:
            self.set_alarm()

    def _perform(self, action: CoordinatorAction) -> None:  # noqa: C901 - one line per action
        self._judge.performs(action)
        match action:
            case Send(session, message):
                self._send(session, message)
            case SendRoot(sessions, root):
                for session in sessions:
                    self.control.down(session, SignedRoot(root, b"signed"))
            case CloseSession(session):
                self.control.close(session)
            case DialBack(session):
                self._dial_back(session)
            case Reply(request):
                answered = self._calls.pop(request, None)
                if answered is not None:
                    self.clock.after(CALL_S, answered, action)
            case DrawPrompt(cursor, task):
                source = Source(task, f"row {cursor % ROWS}")
                self.later(
                    self._random.uniform(0.001, 0.1),
                    self.emit,
                    PromptDrawn(cursor, prompt_of(cursor), source),
                )
            case ScoreSample():
                self.later(self._random.uniform(0.001, 0.5), self._score, action)
            case ProbeRewards(task):
                self.emit(RewardsProbed(task, 0, 0, ""))
            case StepEnvironment():
                self._step(action)
            case ForgetEpisode():
                self._environment.forget(action)
            case StopRun(reason):
                raise AssertionError(f"the run stopped: {reason}")
            case Persist() | DeleteVersion() | SyncVersion() | Note():
                pass
            case ChoiceGrew() | CallRefused():
                pass
            case Convict(worker):
                self.control.bar(worker)
            case AuditTold() | DrawSample() | StopSample() | GiveOperation():
                pass
            case _:
                assert_never(action)

    def _send(self, session: SessionId, message: ToPeer) -> None:
        peer = self.control.peer_of(session)
        if isinstance(message, LeaseGranted):
            self._granted.append(message)
            # The answer may be about a lease that was given to the worker while it reconnected, so that it only
            # guesses the lease.
            key = HeldLease(message.lease, message.attempt)
            owner = self._judge.given_to.get(key) if peer is None else peer.peer
            if owner is not None:
                self._judge.granted(owner, message)
        elif isinstance(message, Refused) and message.reason == "revoked" and peer is not None:
            self._judge.barred.add(peer.peer)
        self.control.down(session, message)

    def _dial_back(self, session: SessionId) -> None:
        peer = self.control.peer_of(session)
        fault = "no answer" if peer is None or peer.closed else ""
        self.later(DIAL_BACK_S if fault else CALL_S, self.emit, DialBackEnded(session, fault))

    def _step(self, action: StepEnvironment) -> None:
        """Answer in place of the environment, which may fail."""
        reward: float | None = reward_of(action.cursor, action.sample)
        if self.rewards_fail:
            self.rewards_fail -= 1
            reward = None
        event = self._environment.step(action, reward)
        self.later(self._random.uniform(0.001, 2.0), self.emit, event)

    def _score(self, action: ScoreSample) -> None:
        """Answer in place of the task's process, which may fail."""
        if self.rewards_fail:
            self.rewards_fail -= 1
            self.emit(SampleScored(action.group, action.sample, None, "crashed"))
        else:
            self.emit(
                SampleScored(
                    action.group, action.sample, reward_of(action.cursor, action.sample), ""
                )
            )


def prompt_of(cursor: int) -> bytes:
    return pack_tokens([2, 3, cursor % 100])
