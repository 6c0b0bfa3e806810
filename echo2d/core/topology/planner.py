"""Making plans: star, chains, and the family of relay trees of which the best is taken.

A relay stripe is carried by a few peers, its carriers: the seed sends to the first, they pass it on among themselves,
and everybody else hangs below them, on each in proportion to its uplink. No peer carries two stripes, and a stripe's
weight follows what its carriers can send. One carrier a stripe is the one-hop relay (Mutualcast), which reaches the
bound whatever the uplinks are; all peers in one stripe are a chain if they are alike; none are a star; a few dozen
carriers in each of some stripes are the two-level plan of large swarms. What the seed has to spare it sends straight:
to a few the first of every stripe, or, in a small swarm, to everybody a stripe of its own.

How many peers carry (the fastest first: slow ones only delay the last frame), in how many stripes, is searched: a
frame takes (N - 1) f / U to get through carriers of uplink U together, at every level of their tree. All candidates
are estimated, the best few are built and judged by `cost_model`.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median

from echo2d.core.base.ids import Generation, PeerId, PlanId
from echo2d.core.topology.cost_model import (
    bound_s,
    downlink,
    fill_in,
    latency_s,
    predicted_s,
    rate_max,
    uplink,
)
from echo2d.core.topology.plan import (
    STAR,
    STRIPES_MAX,
    Job,
    PeerFacts,
    Plan,
    Stripe,
    Tree,
    linkable,
)
from echo2d.core.topology.repair import with_leaf

SLOW_SHARE = (
    0.5  # in a chain, a peer with less than this share of the median uplink passes nothing on
)
BUILT_MAX = (
    8  # candidates that are built and judged; the estimate puts the best of all among the first few
)
CARRIERS_TRIED_MAX = 40  # different numbers of carriers that are tried
LARGE_SWARM = 40  # peers; above it a stripe per carrier would mean too many links
LARGE_BUILT_MAX = (
    3  # candidates in a large swarm: the coordinator has other things to do than to plan
)
LARGE_STRIPES_MAX = 16  # stripes in a large swarm: every peer has as many parents
WEIGHT_MIN = 0.02  # of the seed's own star: frames that come more rarely look like a stalled stream
NEAR = 1.1  # a rate that differs by less from what a plan was made for is the same: its trees stay, and links warm
SAME_JOB = 1.25  # likewise for the bytes to be spread; a delta is much smaller than the full form
SOONER = 0.7  # of the time: then a plan is worth breaking off another one that is on its way
SIMPLER = 1.02  # a plan of fewer stripes is taken if it is at most so much slower: fewer links to keep warm


# Star and auto ignore `chains`: all planners of `registry.SHAPES` are called alike.


def plan_star(
    plan_id: PlanId,
    job: Job,
    seed: PeerFacts,
    peers: Sequence[PeerFacts],
    chains: int = 1,  # noqa: ARG001
) -> Plan:
    """One stripe, straight from the seed, which can be dialled, to everyone."""
    return _plan(plan_id, job, STAR, (seed, *peers), (Stripe(1.0, _star(seed, peers)),))


def plan_chains(
    plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts], chains: int
) -> Plan:
    """Equal stripes, each a chain over the fast peers in another rotation, with the slow ones hung on as leaves."""
    assert 1 <= chains <= STRIPES_MAX
    known = fill_in((seed, *peers))[1:]
    usual = sorted(map(uplink, known))[len(known) // 2] if known else 0.0
    fast = sorted(
        (facts for facts in known if uplink(facts) >= max(SLOW_SHARE * usual, 1e-9)), key=_rank
    )
    order, rest = _alternate(fast)
    slow = sorted({*known} - {*fast}, key=lambda one: (_rank(one), one.peer))
    count = max(1, min(chains, len(order)))
    trees = [Tree(seed.peer, _chain(seed, _rotated(order, index, count))) for index in range(count)]
    plan = _plan(
        plan_id, job, "chain", (seed, *order), tuple(Stripe(1 / count, tree) for tree in trees)
    )
    for facts in (*rest, *slow):
        plan = with_leaf(plan, facts)
    measured = {facts.peer: facts for facts in peers}
    return _plan(
        plan_id, job, "chain", (seed, *(measured[one.peer] for one in plan.peers[1:])), plan.stripes
    )


def plan_auto(
    plan_id: PlanId,
    job: Job,
    seed: PeerFacts,
    peers: Sequence[PeerFacts],
    chains: int = 1,  # noqa: ARG001
) -> Plan:
    """The relay trees, or the star, that should be done first."""
    return min(_candidates(plan_id, job, seed, peers), key=_cost)


def plan_again(
    last: Plan, plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts]
) -> Plan | None:
    """The trees of the last plan, if it still suits: never mended, the same peers, rates and bytes nearly the same.

    It keeps the rates that it was made for, so that many small changes are noticed once they add up.
    """
    now = {facts.peer: facts for facts in (seed, *peers)}
    if last.generation or last.root != seed.peer or last.facts().keys() != now.keys():
        return None
    if last.job.frame_bytes != job.frame_bytes or not _near(
        last.job.wire_bytes, job.wire_bytes, SAME_JOB
    ):
        return None
    if not all(_like(facts, now[facts.peer]) for facts in last.peers):
        return None
    moved = tuple(
        replace(facts, address=now[facts.peer].address, pace=now[facts.peer].pace)
        for facts in last.peers
    )
    return _plan(plan_id, job, last.shape, moved, last.stripes)


def is_much_better(plan: Plan, last: Plan) -> bool:
    """Whether it is predicted to need much less time than the trees of the last one do at its rates."""
    if last.facts().keys() != plan.facts().keys():
        return False
    return (
        plan.predicted_s
        < SOONER * _plan(plan.plan_id, plan.job, last.shape, plan.peers, last.stripes).predicted_s
    )


def _like(one: PeerFacts, other: PeerFacts) -> bool:
    same = _fixed(one) == _fixed(other)
    pairs = (
        (one.uplink, other.uplink),
        (one.downlink, other.downlink),
        (one.latency_s, other.latency_s),
    )
    return same and all(
        a == b or (a is not None and b is not None and _near(a, b, NEAR)) for a, b in pairs
    )


def _fixed(facts: PeerFacts) -> tuple[bool, bool, float | None]:
    return facts.address is None, facts.receive_only, facts.uplink_limit


def _near(one: float, other: float, times: float) -> bool:
    return max(one, other) <= times * min(one, other)


def _candidates(
    plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts]
) -> Iterator[Plan]:
    known = fill_in((seed, *peers))
    yield _plan(plan_id, job, STAR, (seed, *peers), (Stripe(1.0, _star(seed, peers)),), known)
    swarm = _Swarm.of(job, known)
    built = BUILT_MAX if len(peers) <= LARGE_SWARM else LARGE_BUILT_MAX
    for choice in sorted(swarm.choices(), key=swarm.estimate)[:built]:
        yield _plan(plan_id, job, "relay", (seed, *peers), swarm.build(choice), known)


def _cost(plan: Plan) -> float:
    """Doubling the stripes must save SIMPLER - 1 of the time."""
    doublings = math.log2(len(plan.stripes))
    return float(plan.predicted_s * SIMPLER**doublings)


def _plan(
    plan_id: PlanId,
    job: Job,
    shape: str,
    peers: tuple[PeerFacts, ...],
    stripes: tuple[Stripe, ...],
    known: tuple[PeerFacts, ...] = (),
) -> Plan:
    """known: the peers, filled in, if that has been done."""
    assert peers[0].address is not None
    known = known or fill_in(peers)
    predicted, bound = predicted_s(job, known, stripes), bound_s(job, known[0], known[1:])
    return Plan(plan_id, Generation(0), job, shape, peers, stripes, max(predicted, bound), bound)


def _star(seed: PeerFacts, peers: Sequence[PeerFacts]) -> Tree:
    return Tree(seed.peer, {facts.peer: seed.peer for facts in peers})


def _rank(facts: PeerFacts) -> int:
    """Faster peers first, in steps of two: a chain whose order follows every measurement loses its links each time."""
    return -round(math.log2(max(uplink(facts), 1.0)))


# --- chains ----------------------------------------


def _alternate(peers: Sequence[PeerFacts]) -> tuple[list[PeerFacts], list[PeerFacts]]:
    """An order, of any rotation of which no two neighbours are both undiallable, and the peers that do not fit in."""
    open_, closed = (
        [p for p in peers if p.address is not None],
        [p for p in peers if p.address is None],
    )
    order: list[PeerFacts] = []
    for index, facts in enumerate(open_):
        order.append(facts)
        if index < len(closed):
            order.append(closed[index])
    return (order, closed[len(open_) :]) if open_ else (list(closed[:1]), list(closed[1:]))


def _rotated(order: list[PeerFacts], index: int, count: int) -> list[PeerFacts]:
    start = index * len(order) // count
    return order[start:] + order[:start]


def _chain(seed: PeerFacts, order: Sequence[PeerFacts]) -> dict[PeerId, PeerId]:
    before = (seed, *order)
    return {facts.peer: parent.peer for parent, facts in zip(before, order, strict=False)}


# --- relay trees ----------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """The `carriers` fastest peers carry `stripes` stripes."""

    carriers: int
    stripes: int


@dataclass(frozen=True, slots=True)
class _Swarm:
    """ranked: the peers that may carry, fastest first. reach: bytes/s of the first n of them together, for each n."""

    job: Job
    seed: PeerFacts
    peers: tuple[PeerFacts, ...]
    ranked: tuple[PeerFacts, ...]
    reach: tuple[float, ...]

    @staticmethod
    def of(job: Job, peers: Sequence[PeerFacts]) -> "_Swarm":
        """peers: filled in, the seed first. Those that receive too slowly to pass on at full rate do not carry."""
        root, *known = peers
        rate = min(rate_max(root, known), median(map(downlink, known))) if known else 0.0
        ranked = _ranked(
            [facts for facts in known if uplink(facts) > 0 and downlink(facts) >= rate]
        )
        return _Swarm(job, root, tuple(known), ranked, (0.0, *accumulate(map(_stepped, ranked))))

    def choices(self) -> Iterator[_Choice]:
        able = len(self.ranked)
        stripes_max = STRIPES_MAX - 1 if len(self.peers) <= LARGE_SWARM else LARGE_STRIPES_MAX
        step = max(1, able // CARRIERS_TRIED_MAX)
        for carriers in (*range(1, able, step), able) if able and len(self.peers) > 1 else ():
            for stripes in {1, 2, 3, 4, 6, 8, 12, 16, 24, carriers}:
                if stripes <= min(carriers, stripes_max):
                    yield _Choice(carriers, stripes)

    def estimate(self, choice: _Choice) -> tuple[float, int, int]:
        """Seconds, by the formula of the module docstring; then the simpler one."""
        others, frame = max(1, len(self.peers) - 1), self.job.frame_bytes
        reach = self.reach[choice.carriers]
        relayed = reach / others
        u_s = uplink(self.seed)
        rate = u_s if relayed >= u_s else relayed + (u_s - relayed) / len(self.peers)
        each = choice.carriers / choice.stripes
        children = max(1.0, others / each)
        levels = each if children < 2 else 1 + math.log(max(1.0, each), children)
        per_hop = children * frame * choice.carriers / reach + 2 * latency_s(self.seed)
        return self.job.wire_bytes / rate + levels * per_hop, choice.stripes, choice.carriers

    def build(self, choice: _Choice) -> tuple[Stripe, ...]:
        """The stripes with their weights; in a small swarm the last one may be the seed's own star."""
        large = len(self.peers) > LARGE_SWARM
        share = uplink(self.seed) / choice.stripes if large else 0.0
        trees = [self._tree(carriers, share) for carriers in self._crews(choice)]
        rates = self._rates(trees)
        spare = uplink(self.seed) - sum(
            rate * len(tree.children(self.seed.peer))
            for rate, tree in zip(rates, trees, strict=True)
        )
        total = sum(rates)
        direct = spare / len(self.peers)
        if not large and direct > WEIGHT_MIN * total:
            trees.append(_star(self.seed, self.peers))
            rates.append(direct)
            total += direct
        if not total:  # next to this seed nobody is worth a child
            return (Stripe(1.0, _star(self.seed, self.peers)),)
        return tuple(
            Stripe(rate / total, tree) for rate, tree in zip(rates, trees, strict=True) if rate > 0
        )

    def _crews(self, choice: _Choice) -> list[list[PeerFacts]]:
        """The carriers of each stripe: in order, until they have their part of the uplink."""
        share = self.reach[choice.carriers] / choice.stripes
        crews: list[list[PeerFacts]] = [[]]
        sent = 0.0
        for number, facts in enumerate(self.ranked[: choice.carriers]):
            if (
                crews[-1]
                and sent >= share * len(crews) * (1 - 1e-9)
                and len(crews) < choice.stripes
            ):
                crews.append([])
            crews[-1].append(facts)
            sent = self.reach[number + 1]
        return crews

    def _tree(self, crew: Sequence[PeerFacts], seed_share: float) -> Tree:
        """Carriers first, those with most children on top; then everybody else, below whoever has room.

        seed_share: of the seed's uplink, for this tree; it has one child at least.
        """
        uplinks = [_stepped(facts) for facts in crew]
        own = max(1, round(len(self.peers) * seed_share / (seed_share + sum(uplinks))))
        quotas = _quotas(uplinks, len(self.peers) - own)
        ranked = sorted(
            zip(quotas, crew, strict=True), key=lambda one: (-one[0], one[1].address is None)
        )
        carriers = [facts for _, facts in ranked]
        among = {facts.peer for facts in carriers}
        leaves = [facts for facts in self.peers if facts.peer not in among]
        leaves.sort(
            key=lambda one: one.address is not None
        )  # those who cannot be dialled choose first
        places = _Places(self.seed, [(own, self.seed), *ranked])
        for facts in (*carriers, *leaves):
            places.put(facts)
        return Tree(self.seed.peer, places.parents)

    def _rates(self, trees: Sequence[Tree]) -> list[float]:
        """Bytes/s of each stripe: what its carriers can send, as far as the seed can feed them; alike if it cannot."""
        facts = {one.peer: one for one in self.peers}
        able = [_carried(tree, facts) for tree in trees]
        fed = [len(tree.children(self.seed.peer)) for tree in trees]
        left = uplink(self.seed)
        rates = [0.0] * len(trees)
        for copies in sorted(set(fed)):
            same = [number for number, times in enumerate(fed) if times == copies]
            wanted = copies * sum(able[number] for number in same)
            part = min(1.0, left / wanted) if wanted else 0.0
            for number in same:
                rates[number] = part * able[number]
            left -= part * wanted
        return rates


def _stepped(facts: PeerFacts) -> float:
    """Its uplink in steps of a quarter octave: noise must not change who carries, for links stay between versions."""
    return float(2.0 ** (round(4 * math.log2(max(uplink(facts), 1.0))) / 4))


def _ranked(peers: Sequence[PeerFacts]) -> tuple[PeerFacts, ...]:
    """Fastest first; but peers that can be dialled and others in turns, for one of each can serve everybody."""
    turn: Counter[bool] = Counter()
    keyed = []
    for facts in sorted(peers, key=lambda one: (-_stepped(one), one.peer)):
        closed = facts.address is None
        keyed.append((turn[closed], closed, facts))
        turn[closed] += 1
    return tuple(facts for *_, facts in sorted(keyed, key=lambda key: key[:2]))


def _carried(tree: Tree, facts: dict[PeerId, PeerFacts]) -> float:
    """Bytes/s that a stripe's carriers can pass on."""
    below = {peer: children for peer, children in tree.below.items() if peer != tree.root}
    return min(
        (uplink(facts[peer]) / len(children) for peer, children in below.items()), default=0.0
    )


def _quotas(uplinks: Sequence[float], children: int) -> list[int]:
    """How many children each carrier gets, so that the busiest is as little busy as can be."""
    total = sum(uplinks)
    quotas = [int(children * rate / total) for rate in uplinks]
    waiting = [
        ((quota + 1) / rate, number)
        for number, (quota, rate) in enumerate(zip(quotas, uplinks, strict=True))
    ]
    heapq.heapify(waiting)
    for _ in range(children - sum(quotas)):
        _, number = waiting[0]
        quotas[number] += 1
        heapq.heapreplace(waiting, ((quotas[number] + 1) / uplinks[number], number))
    return quotas


class _Places:
    """Where the next peer of one tree goes: below the first carrier that has a place left and can be linked with."""

    def __init__(self, seed: PeerFacts, carriers: Sequence[tuple[int, PeerFacts]]) -> None:
        self._seed = seed
        self._quota = {facts.peer: quota for quota, facts in carriers}
        self._open = deque([seed])
        self.parents: dict[PeerId, PeerId] = {}

    def put(self, facts: PeerFacts) -> None:
        parent = next((one for one in self._open if linkable(one, facts)), None)
        self.parents[facts.peer] = self._seed.peer if parent is None else parent.peer
        if parent is not None:
            self._quota[parent.peer] -= 1
            if not self._quota[parent.peer]:
                self._open.remove(parent)
        if self._quota.get(facts.peer):
            self._open.append(facts)
