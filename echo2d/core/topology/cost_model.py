"""Predicts how long a plan of any shape takes, and the least time that any plan must take.

B bytes spread in frames of f bytes. Every peer sends its copies over its uplink and receives B over
its downlink, all at the same time. The slowest of these counts. The usual start-up time of a frame
is added: at every hop of its tree, the time in which the sender sends one frame to each of its
children, and the latency.

    T =   max( max_p copies_p * B / u_p,  max_p B / d_p )
        + sum_tree weight * max_path sum_hops( children * f / u + latency )

A rate that was not measured counts as the median of the measured rates, and an uplink counts as at
most what its owner allows. If no downlink was measured, no downlink limits the plan.

Not here: slow start, loss, encoding and applying. See docs/design/planning.md for the bound.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from echo2d.core.base.ids import PeerId
from echo2d.core.topology.plan import Job, PeerFacts, Stripe, Tree, copies

# These are used if nothing was measured: 100 Mbit/s, and a round trip of 80 ms between two peers.
RATE_GUESS = 12.5e6  # bytes/s
LATENCY_GUESS_S = 0.02  # one way to the middle of the network


def fill_in(peers: Sequence[PeerFacts]) -> tuple[PeerFacts, ...]:
    """The same peers, with the median of the measured facts in place of each unmeasured fact.

    peers[0] is the root.
    """
    uplink = _usual([facts.uplink for facts in peers[1:] if not facts.receive_only], RATE_GUESS)
    uplinks = [
        uplink if facts.uplink is None else facts.uplink
        for facts in peers
        if not facts.receive_only
    ]
    # A downlink of this rate limits no plan, so an unmeasured one never does.
    enough = min(uplinks[0], sum(uplinks) / max(1, len(peers) - 1)) if peers and uplinks else 0.0
    downlink = _usual([facts.downlink for facts in peers[1:]], max(RATE_GUESS, uplink, enough))
    latency_s = _usual([facts.latency_s for facts in peers], LATENCY_GUESS_S)
    return tuple(
        # `replace` would take several times as long, and this is done for every peer of a run.
        PeerFacts(
            facts.peer,
            min(uplink if facts.uplink is None else facts.uplink, facts.uplink_limit or math.inf),
            max(downlink, facts.uplink or 0.0) if facts.downlink is None else facts.downlink,
            facts.address,
            facts.receive_only,
            latency_s if facts.latency_s is None else facts.latency_s,
            facts.uplink_limit,
        )
        if None in (facts.uplink, facts.downlink, facts.latency_s) or facts.uplink_limit is not None
        else facts
        for facts in peers
    )


def _usual(measured: Sequence[float | None], guess: float) -> float:
    known = [value for value in measured if value is not None]
    return median(known) if known else guess


def uplink(facts: PeerFacts) -> float:
    """Bytes/s that the peer can send; 0 if it only receives. The facts must be filled in."""
    assert facts.uplink is not None
    return 0.0 if facts.receive_only else facts.uplink


def downlink(facts: PeerFacts) -> float:
    """Bytes/s that the peer can receive. The facts must be filled in."""
    assert facts.downlink is not None
    return facts.downlink


def latency_s(facts: PeerFacts) -> float:
    """Seconds one way to the middle of the network. The facts must be filled in."""
    assert facts.latency_s is not None
    return facts.latency_s


def rate_max(seed: PeerFacts, peers: Sequence[PeerFacts]) -> float:
    """The highest rate, in bytes/s, at which all peers can receive one form; ignores downlinks.

    It is min(u_s, (u_s + sum u_i) / N). The facts must be filled in.
    """
    return min(uplink(seed), (uplink(seed) + sum(map(uplink, peers))) / max(1, len(peers)))


def bound_s(job: Job, seed: PeerFacts, peers: Sequence[PeerFacts]) -> float:
    """The least time, in seconds: T* = max(B/u_s, B/min d_i, N*B/(u_s + sum u_i)).

    Mundinger, Weber and Weiss 2008; Kumar and Ross 2006. The facts must be filled in.
    """
    if not peers:
        return 0.0
    return _times(job.wire_bytes, min(rate_max(seed, peers), *map(downlink, peers)))


def predicted_s(job: Job, peers: Sequence[PeerFacts], stripes: tuple[Stripe, ...]) -> float:
    """T_verify in seconds, by the formula of the module docstring.

    The facts must be filled in; peers[0] is the root.
    """
    facts = {one.peer: one for one in peers}
    sending = max(
        (_times(sent, uplink(facts[peer])) for peer, sent in copies(stripes).items()), default=0.0
    )
    slowest = min(map(downlink, peers[1:]), default=math.inf)
    receiving = _times(1, slowest)
    return job.wire_bytes * max(sending, receiving) + sum(
        stripe.weight * _start_s(job, stripe.tree, facts) for stripe in stripes if stripe.weight
    )


def _times(amount: float, rate: float) -> float:
    """The quotient; infinity if the rate is 0."""
    return amount / rate if rate else math.inf


def _start_s(job: Job, tree: Tree, facts: Mapping[PeerId, PeerFacts]) -> float:
    """Seconds until the first frame has reached every peer of the tree.

    At each hop the sender sends the frame to all its children before any of them counts as served.
    """
    start = {tree.root: 0.0}
    for peer in tree.downwards():
        if children := tree.below.get(peer):
            sent = (
                start[peer]
                + _times(len(children) * job.frame_bytes, uplink(facts[peer]))
                + latency_s(facts[peer])
            )
            start.update({child: sent + latency_s(facts[child]) for child in children})
    return max(start.values())
