"""Under any joins, leaves and demands, a loss is replaced at once, and no other worker changes too soon."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from echo2d.core.capacity.activation import ENOUGH, Activation, ActivationRules
from echo2d.core.capacity.worker_cost import COST_SLACK, WorkerOffer
from tests.support.pools import pools_of

NAMES = st.lists(st.integers(0, 11), unique=True, max_size=12)
ROUND = st.tuples(NAMES, NAMES, st.one_of(st.none(), st.floats(0.1, 12.0)), st.floats(0.0, 30.0))


@settings(max_examples=80)
@given(
    st.lists(ROUND, max_size=30),
    st.lists(st.floats(0.2, 3.0), min_size=12, max_size=12),
    st.booleans(),
)
# The pool after the loss has 0.983 of the best one's throughput.
@example(
    rounds=[([0, 11], [], None, 0.0), (list(range(12)), [0], 1.0, 0.0)],
    prices=[2.625, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2.6875, 1],
    by_cost=False,
)
def test_losses_are_replaced_at_once_and_no_worker_changes_too_soon(
    rounds: list[tuple[list[int], list[int], float | None, float]],
    prices: list[float],
    by_cost: bool,
) -> None:
    rules = ActivationRules(review_s=10.0, cool_down_s=20.0, hold_s=40.0, by_cost=by_cost)
    made = {str(name): 0.5 + prices[-1 - name] / 2 for name in range(12)}
    activation, now, changed_at = Activation(), 0.0, float("-inf")
    for here, leaving, needs, wait_s in rounds:
        now += wait_s
        offers = [WorkerOffer(str(name), made[str(name)], prices[name]) for name in here]
        gone = {str(name) for name in leaving}
        able = {offer.name: offer for offer in offers if offer.name not in gone}
        since = dict(activation.active)
        lost = since.keys() - able.keys()
        changes = activation.changes
        pools = pools_of([*able.values()], needs)
        decision = activation.decide(rules, offers, pools, now=now, leaving=gone)
        activation.check()
        assert activation.active.keys() <= able.keys()
        assert set(decision.activate) <= able.keys() - since.keys()
        if activation.changes > changes:
            assert now >= changed_at + rules.cool_down_s
            assert not lost
            changed_at = now
        assert all(
            name in gone or now >= since[name] + rules.hold_s for name in decision.deactivate
        )
        if lost:
            pool = sum(made[name] for name in activation.active)
            known = pools is not None and pools.best.workers
            target = pools.best.mu if pools is not None and known else float("inf")
            wanted = min(ENOUGH * target, sum(made[name] for name in since))
            assert pool >= wanted * (1 - 2 * COST_SLACK) or activation.active.keys() == able.keys()
