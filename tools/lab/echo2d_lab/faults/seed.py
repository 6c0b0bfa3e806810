"""Simulates the seed: a scripted encoder in front of a real relay. It dies with the coordinator.

Every form is one segment of one frame (`peer_links`). Encoding a form again gives the same bytes.
"""

import random
from collections import deque

from echo2d.core.base.canonical import digest_of
from echo2d.core.base.ids import Digest, FormId, RunId
from echo2d.core.protocol.builds import OURS
from echo2d.core.protocol.control_messages import (
    Address,
    EdgeBroken,
    EncodeFailed,
    EncodeVersion,
    ForgetForm,
    FormEncoded,
    FrameAccused,
    Hello,
    PlanEdges,
    SegmentEncoded,
    ToCoordinator,
    ToPeer,
)
from echo2d.core.relay import events as relay_events
from echo2d.core.relay.relay import Relay
from echo2d.core.weights.form import FormFacts
from echo2d.plan.kernel.virtual_clock import Clock
from echo2d_lab.faults.control_links import Control, SimPeer
from echo2d_lab.faults.peer_links import SEGMENT, SimPeerLinks, held
from echo2d_lab.faults.worker import Noted

ENCODE_S = (0.05, 1.0)  # smallest and largest time of each of the two steps of an encoding


def segment_digest(form: FormId) -> Digest:
    return digest_of(f"segment 0 of {form}".encode())


class SimSeed(SimPeer):
    """The seed's process, number 0. failures: this many of the next encodings fail."""

    def __init__(
        self,
        clock: Clock,
        chance: random.Random,
        control: Control,
        links: SimPeerLinks,
        run_id: RunId,
        noted: Noted,
    ) -> None:
        super().__init__(clock, chance, control, 0, 0.001)
        self._links, self._run_id, self._noted = links, run_id, noted
        self.failures = 0
        links.add(self)

    def start(self) -> None:
        self.begin(skew_s=self.chance.uniform(0.0, 1e5))
        self._relay = Relay(self.peer)
        self._orders: dict[FormId, EncodeVersion] = {}
        self._said: dict[FormId, list[ToCoordinator]] = {}
        self._inbox: deque[relay_events.RelayEvent] = deque()
        self._feeding = False
        self.dial()

    def end(self) -> None:
        super().end()
        self._links.died(self.peer)

    # --- its relay

    def wake_at(self) -> float | None:
        return self._relay.wake_at()

    def woken(self) -> None:
        self.relayed(relay_events.RelayDeadlinePassed())

    def relayed(self, event: relay_events.RelayEvent) -> None:
        self._inbox.append(event)
        # An action may cause the next event at once. The queue keeps `handle` from nesting.
        if self._feeding:
            return
        self._feeding = True
        while self._inbox:
            event = self._inbox.popleft()
            actions = self._relay.handle(event, now=self.now)
            self._noted(self.number, event, len(actions))
            for action in actions:
                self._perform(action)
        self._feeding = False
        self.set_alarm()

    def _perform(self, action: relay_events.RelayAction) -> None:
        match action:
            case relay_events.ReportEdgeBroken(plan, generation, peer, reason):
                self.say(EdgeBroken(plan, generation, peer, reason))
            case relay_events.Accuse(form, frame, accused):
                self.say(FrameAccused(form, frame, accused))
            case relay_events.FormArrived():
                pass
            case relay_events.FrameGone(form, frame):
                self._tell(form, EncodeFailed(form, f"frame {frame} is lost"))
            case _:
                self._links.perform(self, action)

    # --- encoding

    def _order(self, order: EncodeVersion) -> None:
        # A repeated order gets the same answers again, unless the encoding failed.
        said = self._said.get(order.form, [])
        if order.form in self._orders and not (said and isinstance(said[-1], EncodeFailed)):
            for message in said:
                self.say(message)
            return
        self._orders[order.form], self._said[order.form] = order, []
        self.later(self.chance.uniform(*ENCODE_S), self._encode_segment, order)

    def _encode_segment(self, order: EncodeVersion) -> None:
        if self._orders.get(order.form) is not order:
            return
        assert FormFacts.decode(order.facts).form == order.form
        if self.failures:
            self.failures -= 1
            self._tell(order.form, EncodeFailed(order.form, "disk full"))
            return
        self._tell(order.form, SegmentEncoded(order.form, SEGMENT, segment_digest(order.form)))
        for event in held(order.form):
            self.relayed(event)
        self.later(self.chance.uniform(*ENCODE_S), self._encode_end, order)

    def _encode_end(self, order: EncodeVersion) -> None:
        if self._orders.get(order.form) is order:
            self._tell(order.form, FormEncoded(order.form, order.digest, 1, 1000, 2000, 0.1))
            self.relayed(relay_events.FormComplete(order.form, 1))

    def _tell(self, form: FormId, message: ToCoordinator) -> None:
        self._said[form].append(message)
        self.say(message)

    # --- its control link

    def hello(self) -> Hello:
        whole = tuple(
            form
            for form, said in self._said.items()
            if any(isinstance(m, FormEncoded) for m in said)
        )
        address = Address("10.0.0.1", 1)
        boot_id = f"seed-{self.boots}"
        return Hello(
            OURS, self._run_id, "seed", "seed", boot_id, 0, address, None, (), (), whole
        )  # fmt: skip

    def heard(self, message: ToPeer) -> None:
        match message:
            case EncodeVersion():
                self._order(message)
            case PlanEdges():
                self.relayed(relay_events.PlanReceived(message))
            case ForgetForm(form):
                self._orders.pop(form, None)
                self._said.pop(form, None)
                self.relayed(relay_events.FormForgotten(form))
            case _:
                raise AssertionError(f"the seed cannot handle {message}")
