"""Makes plans: stars, chains, and relay trees.

For up to SMALL_SWARM peers no rates are needed. Every peer that can send is the *relay* of a stripe:
it gets the frames of its stripe from the seed and passes them on to all others. A *spare* stripe takes
what no relay can, straight from the seed to every peer. While the version spreads, the seed gives each
stripe what its relay can pass on (`relay/credit`).

In a larger swarm a stripe has a few *carriers*. The seed sends to the first carrier, carriers pass
frames on among themselves, and all other peers are leaves below them, distributed in proportion to
uplink. No peer carries two stripes. If the seed has uplink to spare, it sends to more carriers of each
stripe. The planner searches how many peers carry (the fastest ones, because slow ones delay the last
frame) and in how many stripes. It estimates all candidates, builds the best few, and compares those
by `cost_model`.

docs/design/credits.md explains the first kind, docs/design/planning.md the second.
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
    RELAY,
    SMALL_SWARM,
    STAR,
    STRIPES_MAX,
    Job,
    PeerFacts,
    Plan,
    Stripe,
    Tree,
    copies,
    linkable,
)
from echo2d.core.topology.repair import with_leaf
from echo2d.core.topology.uplink_rates import UPLINK_MIN

# At most this many candidates are built and compared. The estimate ranks the truly best one among the first few, and
# planning must not keep the coordinator from its other work.
BUILT_MAX = 3
SWARM_STRIPES_MAX = 16  # in a larger swarm, where every peer has one parent per stripe
# A rate counts as unchanged if it is within this factor of the rate that a plan was made for. So the plan's trees stay,
# and its links stay warm.
NEAR = 1.1
SAME_JOB = 1.25  # likewise for the bytes to spread; a delta is much smaller than the full form


# plan_star and plan_auto ignore `chains`; they have it because all planners of `registry.SHAPES` are
# called alike.


def plan_star(
    plan_id: PlanId,
    job: Job,
    seed: PeerFacts,
    peers: Sequence[PeerFacts],
    chains: int = 1,  # noqa: ARG001
) -> Plan:
    """One stripe, straight from the seed to every peer. The seed must have an address."""
    return _plan(plan_id, job, STAR, (seed, *peers), (Stripe(1.0, _star(seed, peers)),))


def plan_chains(
    plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts], chains: int
) -> Plan:
    """Equal stripes. Each is a chain over the fast peers, rotated further than the chain before.

    Slow peers, and undialable ones that do not fit into a chain, become leaves.
    """
    assert 1 <= chains <= STRIPES_MAX
    known = fill_in((seed, *peers))[1:]
    usual = sorted(map(uplink, known))[len(known) // 2] if known else 0.0
    # In a chain, a peer with less than half of the median uplink passes nothing on.
    fast = sorted((facts for facts in known if uplink(facts) >= max(0.5 * usual, 1e-9)), key=_rank)
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
    """The plan with the shortest predicted time."""
    if len(peers) <= SMALL_SWARM:
        known = fill_in((seed, *peers))
        stripes = _everybody_relays(known, 1.0)
        # A star has no relays, whichever peers join later.
        shape = STAR if len(stripes) == 1 else RELAY
        return _plan(plan_id, job, shape, (seed, *peers), stripes, known)
    return min(_candidates(plan_id, job, seed, peers), key=_cost)


def plan_at_most(
    plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts], copies_max: float
) -> Plan | None:
    """The fastest plan in which the seed sends at most this many copies; None if none was found.

    Its shape is never "star", not even if the seed serves every peer: a peer that joins later goes
    below another peer, so that the seed sends nothing more.
    """
    if len(peers) <= SMALL_SWARM:
        known = fill_in((seed, *peers))
        # A spare frame costs the seed one copy per peer, a relayed frame costs one copy in all.
        others = len(peers) - 1
        spare = min(1.0, (copies_max - 1) / others) if others > 0 else 1.0
        stripes = _everybody_relays(known, spare)
        if copies(stripes).get(seed.peer, 0.0) > copies_max * (1 + 1e-9):
            return None
        return _plan(plan_id, job, RELAY, (seed, *peers), stripes, known)
    return min(_bounded(plan_id, job, seed, peers, copies_max), key=_cost, default=None)


def plan_again(
    last: Plan, plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts]
) -> Plan | None:
    """The last plan's trees for a new job; None if they do not suit any more.

    They suit if the last plan depends on rates (other plans cost nothing to make again) and was never repaired, the
    peers are the same, and rates and bytes are nearly the same. The plan keeps the rates that it was made for, so that
    many small changes are noticed once they add up.
    """
    now = {facts.peer: facts for facts in (seed, *peers)}
    if not last.depends_on_rates or last.generation or last.root != seed.peer:
        return None
    if last.facts().keys() != now.keys():
        return None
    if last.job.frame_bytes != job.frame_bytes or not _near(
        last.job.wire_bytes, job.wire_bytes, SAME_JOB
    ):
        return None
    if not all(_like(facts, now[facts.peer]) for facts in last.peers):
        return None
    moved = tuple(
        facts
        if facts.address == now[facts.peer].address
        else replace(facts, address=now[facts.peer].address)
        for facts in last.peers
    )
    return _plan(plan_id, job, last.shape, moved, last.stripes)


def is_much_better(plan: Plan, last: Plan) -> bool:
    """Whether `plan` is predicted to need much less time than the trees of `last` at the same rates."""
    before_s = foretold_s(last, plan)
    # Only a plan that needs less than 0.7 of the time is worth interrupting the spreading one.
    return before_s is not None and plan.predicted_s < 0.7 * before_s


def foretold_s(last: Plan, plan: Plan) -> float | None:
    """The time predicted for the trees of `last` at the rates of `plan`; None: their peers differ."""
    if last.facts().keys() != plan.facts().keys():
        return None
    return _plan(plan.plan_id, plan.job, last.shape, plan.peers, last.stripes).predicted_s


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
    for choice in sorted(swarm.choices(), key=swarm.estimate)[:BUILT_MAX]:
        yield _plan(plan_id, job, RELAY, (seed, *peers), swarm.build(choice), known)


def _bounded(
    plan_id: PlanId, job: Job, seed: PeerFacts, peers: Sequence[PeerFacts], copies_max: float
) -> Iterator[Plan]:
    """The candidates in which the seed sends at most this many copies.

    A peer that cannot be dialled may find a place only below the seed, and then the plan exceeds the bound. Therefore
    plans in which only dialable peers carry are candidates, too: such a carrier can take any child.
    """
    known = fill_in((seed, *peers))
    most = copies_max * (1 + 1e-9)
    swarms = [_Swarm.of(job, known, copies_max)]
    if any(facts.address is None for facts in swarms[0].ranked):
        swarms.append(swarms[0].dialable())
    for swarm in swarms:
        for choice in sorted(swarm.choices(), key=swarm.estimate)[:BUILT_MAX]:
            stripes = swarm.build(choice)
            if copies(stripes).get(seed.peer, 0.0) <= most:
                yield _plan(plan_id, job, RELAY, (seed, *peers), stripes, known)


def _cost(plan: Plan) -> float:
    """The predicted time, with a penalty for more stripes."""
    doublings = math.log2(len(plan.stripes))
    # Each doubling of the stripes must save 2 % of the time: fewer links are easier to keep warm.
    return float(plan.predicted_s * 1.02**doublings)


def _plan(
    plan_id: PlanId,
    job: Job,
    shape: str,
    peers: tuple[PeerFacts, ...],
    stripes: tuple[Stripe, ...],
    known: tuple[PeerFacts, ...] = (),
) -> Plan:
    """A plan of generation 0. known: the peers, if `fill_in` has been applied to them already."""
    assert peers[0].address is not None
    known = known or fill_in(peers)
    predicted, bound = predicted_s(job, known, stripes), bound_s(job, known[0], known[1:])
    return Plan(plan_id, Generation(0), job, shape, peers, stripes, max(predicted, bound), bound)


def _star(seed: PeerFacts, peers: Sequence[PeerFacts]) -> Tree:
    return Tree(seed.peer, {facts.peer: seed.peer for facts in peers})


def _rank(facts: PeerFacts) -> int:
    """A sort key that puts fast peers first, in steps of a factor of two.

    A chain whose order followed every measurement would lose its links each time.
    """
    return -round(math.log2(max(uplink(facts), 1.0)))


# --- chains ----------------------------------------


def _alternate(peers: Sequence[PeerFacts]) -> tuple[list[PeerFacts], list[PeerFacts]]:
    """An order for a chain, and the peers that do not fit into it.

    In no rotation of the order are two undialable peers neighbours, because neither could dial the other.
    """
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


# --- small swarms ----------------------------------------


def _everybody_relays(known: Sequence[PeerFacts], spare: float) -> tuple[Stripe, ...]:
    """A stripe for each relay, and the spare stripes; a star if no peer can relay.

    spare: the share of the bytes that all spare stripes together take at most; 1: no limit.

    A relay behind NAT reaches other peers behind NAT through a third peer that can be dialled. Which third peer has
    uplink for that shows only while the version spreads. So a relay behind NAT has a stripe through each of a few third
    peers, and a spare stripe in which the seed serves the other peers behind NAT. If most of the uplink is behind NAT,
    dialable peers only serve the peers behind NAT, and reach each other through these.
    """
    seed, *peers = known
    star = _star(seed, peers)
    relays = [facts for facts in peers if uplink(facts) > 0] if len(peers) > 1 else []
    behind = [facts for facts in peers if facts.address is None]
    closed = [facts for facts in relays if facts in behind] if len(behind) > 1 else []
    opened = [facts for facts in relays if facts not in closed]
    # The star and a spare stripe for each relay behind NAT are made in any case.
    room = (STRIPES_MAX - 1 - len(closed)) // max(1, len(relays))
    # A relay that cannot be dialled has at most three third peers: more stripes would delay more frames.
    trees = _through(seed, closed, opened, peers, behind, min(3, room))
    if sum(map(uplink, closed)) > sum(map(uplink, opened)):
        others = [facts for facts in peers if facts not in behind]
        trees += _through(seed, opened, closed, peers, others, 1)
    else:
        trees += [_below(seed, facts.peer, peers) for facts in opened]
    if not trees:
        return (Stripe(1.0, star),)
    # Each spare stripe may take its whole share, so the allowed share is divided among them.
    spare = spare if spare == 1 else spare / (1 + len(closed))
    weights, direct = _shares(known, trees, spare)
    stripes = [Stripe(weight, tree) for weight, tree in zip(weights, trees, strict=True)]
    if spare:
        halves = [_below(seed, facts.peer, peers, behind, seed.peer) for facts in closed]
        stripes += [Stripe(0.0, tree, spare) for tree in halves]
        stripes.append(Stripe(direct, star, spare))
    return tuple(stripes)


def _through(
    seed: PeerFacts,
    relays: Sequence[PeerFacts],
    thirds: Sequence[PeerFacts],
    peers: Sequence[PeerFacts],
    apart: Sequence[PeerFacts],
    most: int,
) -> list[Tree]:
    """For each relay up to `most` trees, each with another third peer that serves the peers `apart`."""
    return [
        # Each relay begins with another third peer, so that all of them are used equally.
        _below(seed, relay.peer, peers, apart, thirds[(number + turn) % len(thirds)].peer)
        for number, relay in enumerate(relays)
        for turn in range(min(most, len(thirds)))
    ]


def _below(
    seed: PeerFacts,
    relay: PeerId,
    peers: Sequence[PeerFacts],
    apart: Sequence[PeerFacts] = (),
    third: PeerId | None = None,
) -> Tree:
    """The tree with the peers `apart` below the third peer, and all other peers below the relay."""
    parents = {facts.peer: relay for facts in peers}
    if third is not None:
        parents |= {facts.peer: third for facts in apart}
    return Tree(seed.peer, parents | {relay: seed.peer})


def _shares(
    known: Sequence[PeerFacts], trees: Sequence[Tree], spare: float
) -> tuple[list[float], float]:
    """The shares that these stripes and the star get by the known rates. The shares add up to 1."""
    root = known[0].peer
    # No rate may be 0, so that no sum of rates is 0.
    able = {facts.peer: max(UPLINK_MIN, uplink(facts)) for facts in known}
    firsts = [tree.children(root)[0] for tree in trees]
    # Only a first relay and its third peer have children.
    thirds = [
        next((one for one in tree.below if one not in (root, first)), None)
        for tree, first in zip(trees, firsts, strict=True)
    ]
    turns = Counter(firsts)
    rates = [
        able[first] / turns[first] / len(tree.children(first))
        for tree, first in zip(trees, firsts, strict=True)
    ]
    lent: dict[PeerId, float] = {}
    for tree, third, rate in zip(trees, thirds, rates, strict=True):
        if third is not None:
            lent[third] = lent.get(third, 0.0) + rate * len(tree.children(third))
    for number, (first, third) in enumerate(zip(firsts, thirds, strict=True)):
        if third is None:
            rates[number] *= max(0.0, 1 - lent.get(first, 0.0) / able[first])
        else:
            rates[number] *= min(1.0, able[third] / lent[third])
    part = min(1.0, able[root] / sum(rates))
    relayed = part * sum(rates)
    direct = max(0.0, able[root] - relayed) / (len(known) - 1)
    if spare < 1:
        direct = min(direct, relayed * spare / (1 - spare))
    total = relayed + direct
    return [part * rate / total for rate in rates], direct / total


# --- relay trees ----------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """The `carriers` fastest peers carry `stripes` stripes."""

    carriers: int
    stripes: int


@dataclass(frozen=True, slots=True)
class _Swarm:
    """The peers of one job, with facts filled in."""

    job: Job
    seed: PeerFacts
    peers: tuple[PeerFacts, ...]
    ranked: tuple[PeerFacts, ...]  # the peers that may carry, fastest first
    # Entry n is the uplink of the first n of `ranked` together, in bytes/s.
    reach: tuple[float, ...]
    # The most copies of the form that the seed should send; None: as many as its uplink allows.
    copies_max: float | None = None

    @staticmethod
    def of(job: Job, peers: Sequence[PeerFacts], copies_max: float | None = None) -> "_Swarm":
        """The swarm of these peers, filled in and the seed first.

        A peer that receives too slowly to pass frames on at full rate may not carry.
        """
        root, *known = peers
        rate = min(rate_max(root, known), median(map(downlink, known))) if known else 0.0
        ranked = _ranked(
            [facts for facts in known if uplink(facts) > 0 and downlink(facts) >= rate]
        )
        return _Swarm(job, root, tuple(known), ranked, _reach(ranked), copies_max)

    def dialable(self) -> "_Swarm":
        """The same swarm, in which only peers that can be dialled may carry."""
        ranked = tuple(facts for facts in self.ranked if facts.address is not None)
        return replace(self, ranked=ranked, reach=_reach(ranked))

    def choices(self) -> Iterator[_Choice]:
        """All candidates to estimate; none if no peer may carry or there is only one peer."""
        able = len(self.ranked)
        # About 40 different numbers of carriers are tried.
        step = max(1, able // 40)
        for carriers in (*range(1, able, step), able) if able and len(self.peers) > 1 else ():
            for stripes in {1, 2, 3, 4, 6, 8, 12, 16, carriers}:
                if stripes <= min(carriers, SWARM_STRIPES_MAX):
                    yield _Choice(carriers, stripes)

    def estimate(self, choice: _Choice) -> tuple[float, int, int]:
        """A sort key: estimated seconds, then fewer stripes, then fewer carriers.

        A frame takes (N - 1) f / U at every level of its tree, where U is the uplink of all carriers of
        the stripe together.
        """
        others, frame = max(1, len(self.peers) - 1), self.job.frame_bytes
        reach = self.reach[choice.carriers]
        relayed = reach / others
        u_s = uplink(self.seed)
        direct = self._direct((u_s - relayed) / len(self.peers), relayed, relayed)
        rate = u_s if relayed >= u_s else relayed + direct
        each = choice.carriers / choice.stripes
        children = max(1.0, others / each)
        levels = each if children < 2 else 1 + math.log(max(1.0, each), children)
        per_hop = children * frame * choice.carriers / reach + 2 * latency_s(self.seed)
        return self.job.wire_bytes / rate + levels * per_hop, choice.stripes, choice.carriers

    def build(self, choice: _Choice) -> tuple[Stripe, ...]:
        """The stripes and their weights."""
        share = uplink(self.seed) / choice.stripes
        trees = [self._tree(carriers, share) for carriers in self._crews(choice)]
        rates = self._rates(trees)
        total = sum(rates)
        # No stripe gets anything if the carriers' uplinks are negligible beside the seed's.
        if not total:
            return (Stripe(1.0, _star(self.seed, self.peers)),)
        return tuple(
            Stripe(rate / total, tree) for rate, tree in zip(rates, trees, strict=True) if rate > 0
        )

    def _direct(self, able: float, relayed: float, sent: float) -> float:
        """Bytes/s that the seed sends to every peer itself: at most `able`, and within copies_max.

        relayed: bytes/s of all other stripes, for which the seed sends `sent` bytes/s.
        """
        count = len(self.peers)
        if self.copies_max is None or count <= self.copies_max:
            return able
        return min(able, max(0.0, self.copies_max * relayed - sent) / (count - self.copies_max))

    def _crews(self, choice: _Choice) -> list[list[PeerFacts]]:
        """Divide the carriers, in their order, into one crew per stripe, of about equal uplink."""
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
        """The tree of one stripe: carriers on top, those with most children first, leaves below.

        seed_share: bytes/s of the seed's uplink for this tree. The seed has at least one child.
        """
        uplinks = [_stepped(facts) for facts in crew]
        own = max(1, round(len(self.peers) * seed_share / (seed_share + sum(uplinks))))
        if self.copies_max is not None:
            own = min(own, max(1, int(self.copies_max)))
        quotas = _quotas(uplinks, len(self.peers) - own)
        ranked = sorted(
            zip(quotas, crew, strict=True), key=lambda one: (-one[0], one[1].address is None)
        )
        carriers = [facts for _, facts in ranked]
        among = {facts.peer for facts in carriers}
        leaves = [facts for facts in self.peers if facts.peer not in among]
        # Undialable leaves choose first, because only carriers with an address can take them.
        leaves.sort(key=lambda one: one.address is not None)
        places = _Places(self.seed, [(own, self.seed), *ranked])
        for facts in (*carriers, *leaves):
            places.put(facts)
        return Tree(self.seed.peer, places.parents)

    def _rates(self, trees: Sequence[Tree]) -> list[float]:
        """Bytes/s of each stripe: what its carriers can send, as far as the seed can feed them.

        Stripes to which the seed sends the fewest copies are fed first. When its uplink runs out, all
        stripes with the same number of copies are cut by the same factor.
        """
        facts = {one.peer: one for one in self.peers}
        able = [_carried(tree, facts) for tree in trees]
        fed = [len(tree.children(self.seed.peer)) for tree in trees]
        left = uplink(self.seed)
        rates = [0.0] * len(trees)
        for sent in sorted(set(fed)):
            same = [number for number, times in enumerate(fed) if times == sent]
            wanted = sent * sum(able[number] for number in same)
            part = min(1.0, left / wanted) if wanted else 0.0
            for number in same:
                rates[number] = part * able[number]
            left -= part * wanted
        return rates


def _reach(ranked: Sequence[PeerFacts]) -> tuple[float, ...]:
    return (0.0, *accumulate(map(_stepped, ranked)))


def _stepped(facts: PeerFacts) -> float:
    """The peer's uplink, rounded in steps of a factor of 2 ** (1/4).

    Noise must not change which peers carry, so that links stay open between versions.
    """
    return float(2.0 ** (round(4 * math.log2(max(uplink(facts), 1.0))) / 4))


def _ranked(peers: Sequence[PeerFacts]) -> tuple[PeerFacts, ...]:
    """Fastest first, but dialable and undialable peers in turn, because a crew with one of each can
    serve all peers.
    """
    turn: Counter[bool] = Counter()
    keyed = []
    for facts in sorted(peers, key=lambda one: (-_stepped(one), one.peer)):
        closed = facts.address is None
        keyed.append((turn[closed], closed, facts))
        turn[closed] += 1
    return tuple(facts for *_, facts in sorted(keyed, key=lambda key: key[:2]))


def _carried(tree: Tree, facts: dict[PeerId, PeerFacts]) -> float:
    """Bytes/s that a stripe's carriers can pass on: the slowest of them sets the rate."""
    below = {peer: children for peer, children in tree.below.items() if peer != tree.root}
    return min(
        (uplink(facts[peer]) / len(children) for peer, children in below.items()), default=0.0
    )


def _quotas(uplinks: Sequence[float], children: int) -> list[int]:
    """How many children each carrier gets, so that the busiest carrier is as little busy as possible."""
    total = sum(uplinks)
    quotas = [int(children * rate / total) for rate in uplinks]
    waiting = [
        ((quota + 1) / rate, number)
        for number, (quota, rate) in enumerate(zip(quotas, uplinks, strict=True))
    ]
    heapq.heapify(waiting)
    # Rounding down left a few children over; each goes to the carrier that is then least busy.
    for _ in range(children - sum(quotas)):
        _, number = waiting[0]
        quotas[number] += 1
        heapq.heapreplace(waiting, ((quotas[number] + 1) / uplinks[number], number))
    return quotas


class _Places:
    """Assigns the places of one tree.

    A peer goes below the first carrier that has a place left and can be linked with it, or if there is
    none, below the seed.
    """

    def __init__(self, seed: PeerFacts, carriers: Sequence[tuple[int, PeerFacts]]) -> None:
        self._seed = seed
        self._quota = {facts.peer: quota for quota, facts in carriers}
        self._open = deque([seed])
        self.parents: dict[PeerId, PeerId] = {}

    def put(self, facts: PeerFacts) -> None:
        parent = None
        for one in self._open:
            if linkable(one, facts):
                parent = one
                break
        self.parents[facts.peer] = self._seed.peer if parent is None else parent.peer
        if parent is not None:
            self._quota[parent.peer] -= 1
            if not self._quota[parent.peer]:
                self._open.remove(parent)
        if self._quota.get(facts.peer):
            self._open.append(facts)
