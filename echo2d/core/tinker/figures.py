"""What clients of the Tinker API have used since the coordinator started: steps, tokens, the learner's time, money.

    optim_step ended, sample ended --> counts of the model, of its session, and of the caller --> status, metrics

The counts of a model and of a session end with the session, those of a caller stay. They begin at 0 when the
coordinator starts, like all counters of the status. A step counts its tokens when it is applied: a gradient that was
dropped does not count, and what the learner computes again after a fault counts once.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo2d.core.status.schema import CallerStatus, ClientModelStatus, SessionStatus
from echo2d.core.tinker.draw_queue import AskedSample
from echo2d.core.tinker.events import ModelMade, SessionName
from echo2d.core.tinker.operations import ModelId, Operations
from echo2d.core.tinker.samplers import SampleQueue


@dataclass(slots=True)
class Counts:
    steps: int = 0
    # Tokens of the forward_backward calls of these steps.
    trained_tokens: int = 0
    # The learner's time for these steps, in seconds.
    train_s: float = 0.0
    sequences: int = 0
    sampled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """workers_usd: what the workers cost since the coordinator started. learner_usd_per_h: 0: not known."""

    workers_usd: float
    learner_usd_per_h: float


class Figures:
    """See the module docstring. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._models = defaultdict[ModelId, Counts](Counts)
        self._sessions = defaultdict[SessionName, Counts](Counts)
        self._callers = defaultdict[str, Counts](Counts)
        self._opened_at: dict[SessionName, float] = {}

    def opened(self, session: SessionName, *, now: float) -> None:
        """The session has begun, or the coordinator has, and found it in the ledger."""
        self._opened_at[session] = now

    def session_ended(self, session: SessionName) -> None:
        self._opened_at.pop(session, None)
        self._sessions.pop(session, None)
        for model in [each for each in self._models if each.partition(":")[0] == session]:
            del self._models[model]

    def stepped(
        self, caller: str, session: SessionName, model: ModelId, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Count a step that was applied, by what the learner reports of it. Returns what the client is told."""
        told = dict(found)
        tokens, seconds = int(told.pop("tokens", 0)), float(told.pop("seconds", 0.0))
        # The session may have ended while the step was computed.
        own = [self._sessions[session], self._models[model]] if session in self._opened_at else []
        for each in (self._callers[caller], *own):
            each.steps += 1
            each.trained_tokens += tokens
            each.train_s += seconds
        return told

    def sampled(self, sample: AskedSample, tokens: int) -> None:
        """Workers have drawn a sample of an open session."""
        of = sample.sampler
        for each in (self._callers[of.caller], self._sessions[of.session]):
            each.sequences += sample.order.count
            each.sampled_tokens += tokens

    def caller(
        self, caller: str, sessions: Sequence[SessionStatus], checkpoints: int
    ) -> CallerStatus:
        """A caller at one moment. sessions: its open ones."""
        counts = self._callers.get(caller) or Counts()
        return CallerStatus(
            caller=caller,
            sessions=len(sessions),
            models=sum(len(each.models) for each in sessions),
            checkpoints=checkpoints,
            steps=counts.steps,
            trained_tokens=counts.trained_tokens,
            train_s=counts.train_s,
            sequences=counts.sequences,
            sampled_tokens=counts.sampled_tokens,
            operations_waiting=sum(each.operations_waiting for each in sessions),
            samples_waiting=sum(each.samples_waiting + each.unscored for each in sessions),
        )

    def session(
        self,
        caller: str,
        session: SessionName,
        heard_at: float,
        models: Sequence[ClientModelStatus],
        queue: SampleQueue,
        checkpoints: int,
        prices: Prices,
        *,
        now: float,
    ) -> SessionStatus:
        """A session at one moment; models: its own."""
        counts = self._sessions.get(session) or Counts()
        return SessionStatus(
            session=session,
            caller=caller,
            age_s=now - self._opened_at[session],
            silent_s=now - heard_at,
            models=tuple(models),
            steps=counts.steps,
            trained_tokens=counts.trained_tokens,
            train_s=counts.train_s,
            sequences=counts.sequences,
            sampled_tokens=counts.sampled_tokens,
            operations_waiting=sum(each.operations_waiting for each in models),
            bytes_waiting=sum(each.bytes_waiting for each in models),
            samplers=queue.samplers,
            drawn=queue.drawn,
            samples_waiting=queue.waiting,
            other_weights=queue.other_weights,
            unscored=queue.unscored,
            checkpoints=checkpoints,
            cost_usd=self._cost(counts, prices),
        )

    def model(
        self, model: ModelId, made: ModelMade | None, operations: Operations
    ) -> ClientModelStatus:
        counts = self._models.get(model) or Counts()
        return ClientModelStatus(
            model=model,
            rank=None if made is None else made.rank,
            steps=counts.steps,
            trained_tokens=counts.trained_tokens,
            train_s=counts.train_s,
            running="" if operations.running is None else operations.running.kind,
            operations_waiting=operations.waiting,
            bytes_waiting=operations.waiting_bytes,
        )

    def _cost(self, counts: Counts, prices: Prices) -> float | None:
        """What a session has cost; None: nothing has a price.

        The workers' cost is shared by sampled tokens: of all that workers have cost since the coordinator started, also
        while they were idle, a session pays its share of the tokens that all callers have sampled since then. The
        learner costs the time that it took for the session's steps.
        """
        if not prices.workers_usd and not prices.learner_usd_per_h:
            return None
        every = sum(each.sampled_tokens for each in self._callers.values())
        share = counts.sampled_tokens / every if every else 0.0
        return prices.workers_usd * share + prices.learner_usd_per_h * counts.train_s / 3600.0

    def check(self) -> None:
        assert self._sessions.keys() <= self._opened_at.keys()
