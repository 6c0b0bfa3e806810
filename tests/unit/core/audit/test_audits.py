"""The audit within the whole machine: who waits, who is convicted, and what happens to groups."""

from dataclasses import replace
from typing import Any

import pytest

from echo2d.core.audit import audits as audits_module
from echo2d.core.audit.baseline import BASELINE_TRAJECTORIES, K_MIN
from echo2d.core.base.ids import PeerId, Version
from echo2d.core.cluster.events import PeerConnected, PeerDisconnected, PeerPardoned
from echo2d.core.coordinator.events import Recovered
from echo2d.core.coordinator.state import PLAN_SECRET_BYTES, CoordinatorState
from echo2d.core.protocol.control_messages import (
    AnswersScored,
    AnswerToScore,
    Goodbye,
    Heartbeat,
    HeldLease,
    Refused,
)
from echo2d.core.protocol.evidence import Evidence
from echo2d.core.protocol.sampling import Sampling
from echo2d.core.protocol.trajectory import AuthoredSpan, TrajectoryRecord, TrajectoryScore
from echo2d.core.rules.audit import AuditRules
from echo2d.core.work.events import SampleReturned
from echo2d.core.work.training.judge import RETURNED_WAIT_S
from tests.support.audited_world import (
    INT8_K,
    LEARNT,
    LIE,
    MIXED_K,
    AuditedWorld,
    started,
    train_on,
    trajectories,
)
from tests.support.coordinator_world import messages, publish_step, rules, train, version_key


def limits_of(world: Any, engine_class: str) -> Any:
    """What the ledger holds."""
    found = [each for each in world.ledger.recover().limits if each.engine_class == engine_class]
    return found[0]


def test_a_newcomer_is_audited_before_its_first_answers_are_trained_on() -> None:
    world = started("a", auditor=False)
    request = world.ask_batch(1)
    world.work()
    assert request not in world.replies, "an answer was trained on without a verdict"
    assert world.state.status().audit.waiting > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("learnt", [True, False])
def test_honest_workers_train_as_without_an_audit(learnt: bool) -> None:
    world = AuditedWorld(learnt=learnt)
    world.connect("seed", kind="seed", slots=0)
    world.connect("auditor", kind="auditor", slots=0)
    world.connect("a")
    world.connect("mine", trusted=True)
    train(world, 60)
    assert world.audits.baseline.limits is not None
    assert (world.standing("mine"), world.standing("a")) == ("trusted", "clear")
    assert (world.convicts, world.returned) == ([], [])
    assert limits_of(world, "torch").k == (LEARNT.k if learnt else K_MIN)


def test_a_liar_is_convicted_and_nothing_of_it_is_trained_on() -> None:
    world = started("liar", "mine")
    world.ask_batch(1)
    for _ in range(40):
        world.lie("liar")
        world.drain()
        if world.convicts:
            break
        world.step_workers()
    assert [each.worker for each in world.convicts] == ["liar"]
    assert "seeds" in world.convicts[0].reason
    refusal = messages(world.peers["liar"], Refused)[-1]
    assert (refusal.reason, refusal.permanent) == ("convicted", True)
    assert world.state.status().workers[0].verdict
    world.work()
    train_on(world, 6)
    assert [t for t in trajectories(world) if t.worker == "liar"] == []
    # It cannot come back before somebody pardons it.
    assert world.connect("liar").closed
    world.handle(PeerPardoned(PeerId("liar")))
    assert not world.connect("liar").closed
    assert world.standing("liar") == "new"


def train_until_convicted(world: AuditedWorld) -> None:
    for _ in range(40):
        if world.convicts:
            return
        train_on(world, 1)
    raise AssertionError("nobody was convicted")


def test_answers_that_a_worker_wrote_before_its_conviction_leave_the_buffer() -> None:
    world = started("liar", "mine", newcomer=0, share=1.0)
    world.work()  # honest so far: groups are complete and buffered
    before = [group for group in world.ledger.groups if any_of(world, group, "liar")]
    assert before
    world.liars.add("liar")
    train_until_convicted(world)
    frozen = {group for batch in world.ledger.frozen.values() for group in batch.groups}
    for group in world.ledger.groups.keys() - frozen:
        assert not any_of(world, group, "liar")
    world.work()
    train_on(world, 3)


def any_of(world: AuditedWorld, group: Any, worker: str) -> bool:
    return any(t.worker == worker for t in world.ledger.groups[group].record.trajectories)


def test_a_flagged_answer_goes_back_and_another_worker_gets_its_sample() -> None:
    world = started("liar", "other", "mine")
    liar = world.peers["liar"]
    key, sample = liar.open[0]
    group = liar.leases[key].group
    world.say(liar, liar.finish(key, sample, tokens=LIE))
    world.drain()
    assert world.returned == [SampleReturned(group, sample)]
    assert world.standing("liar") == "flagged"
    # Slots become free: of the liar's and of others'.
    for peer in [world.peers[name] for name in ("liar", "other", "mine")]:
        for held, number in list(peer.open)[:2]:
            world.say(peer, peer.finish(held, number))
    world.drain()
    holders = [
        peer.name
        for peer in world.peers.values()
        for held, number in peer.open
        if peer.leases[held].group == group and number == sample
    ]
    assert holders
    assert "liar" not in holders
    world.work()
    train_on(world, 3)


def test_a_flagged_sample_goes_back_when_its_pending_reward_has_arrived() -> None:
    world = started("liar", "mine")
    liar = world.peers["liar"]
    key, sample = liar.open[0]
    world.say(liar, liar.finish(key, sample, tokens=LIE))
    # The auditor answers before the task does.
    order = next(
        at for at, event in enumerate(world.pending)
        if isinstance(getattr(event, "message", None), AnswersScored)
    )  # fmt: skip
    world.deliver(order)
    assert world.returned == []
    world.drain()
    assert len(world.returned) == 1


def test_a_worker_that_waits_too_long_for_a_verdict_loses_its_sample_to_another_one() -> None:
    world = started("a", "mine", auditor=False, wait_s=5.0)
    world.work()
    assert world.state.status().audit.waiting > 0  # type: ignore[union-attr]
    world.pass_time(5.1)
    assert world.returned
    assert world.state.status().audit.waiting == 0  # type: ignore[union-attr]
    for _ in range(3):
        world.work()
    train_on(world, 2)


def test_no_sample_is_given_back_without_another_worker() -> None:
    world = started("a", auditor=False, wait_s=5.0)
    world.work()
    world.pass_time(30.0)
    assert world.returned == []
    assert any("no auditor is here" in each for each in world.state.status().attention)


def test_limits_are_learnt_from_trusted_workers_before_others_get_leases() -> None:
    world = started("a", learnt=False)
    assert any("no trusted worker" in each for each in world.state.status().attention)
    assert world.peers["a"].leases == {}
    world.connect("mine", trusted=True)
    assert world.audits.learns()
    for _ in range(BASELINE_TRAJECTORIES):
        if world.audits.baseline.limits is not None:
            break
        assert [t for t in trajectories(world) if t.worker == "a"] == []
        train_on(world, 1)
    assert limits_of(world, "torch") is not None
    train_on(world, 5)
    assert world.standing("a") == "clear"
    world.crash()
    assert not world.audits.learns()


def test_no_worker_waits_or_is_convicted_without_a_trusted_worker() -> None:
    world = started("liar", learnt=False, trusted=(), share=1.0)
    world.liars.add("liar")
    train_on(world, 8)
    assert world.convicts == []
    assert world.standing("liar") == "suspected"
    sentences = world.state.status().attention
    assert any("audit.trusted" in each for each in sentences)
    assert any("looks like a liar" in each for each in sentences)


def test_a_trusted_worker_that_lies_is_reported_but_stays() -> None:
    world = started("mine", share=1.0)
    world.liars.add("mine")
    train_on(world, 12)
    assert world.convicts == []
    assert any("is trusted, but" in fault.text for fault in world.state.status().faults)


def test_a_partial_is_blamed_on_the_worker_that_wrote_it() -> None:
    world = started("liar", "mine", newcomer=0, share=1.0)
    liar = world.peers["liar"]
    key, sample = liar.open[0]
    group = liar.leases[key].group
    world.say(liar, liar.wrote(key, sample, 9, 9))
    world.handle(PeerDisconnected(liar.session, "gone"))
    world.pass_time(16.0)
    world.say(world.peers["mine"], Heartbeat(0))
    world.say(world.peers["auditor"], Heartbeat(0))
    train_on(world, 3)
    by_worker = {
        each.worker: each.reasons
        for each in world.told
        if (each.group, each.sample) == (group, sample)
    }
    assert by_worker[PeerId("liar")] == ("logprobs", "seed")
    assert by_worker.get(PeerId("mine"), ()) == ()


def test_samples_that_wait_for_a_verdict_are_judged_again_after_a_restart() -> None:
    world = started("a", "mine", auditor=False, wait_s=3600.0)
    world.work()
    waiting = len(world.audits.waiting)
    assert waiting
    world.crash()
    # Whom the operator trusts is not known before they say hello again.
    assert len(world.audits.waiting) >= waiting
    world.connect("auditor", kind="auditor", slots=0)
    world.work()
    assert len(world.audits.waiting) == 0


def test_answers_are_judged_by_the_sampling_that_they_were_drawn_with() -> None:
    """Also after a restart with another one: the group's record says it, not the config."""
    world = started("a", "mine", auditor=False, wait_s=3600.0)
    before = world.rules.tasks[0].sampling
    world.work()
    assert world.audits.waiting
    changed = replace(world.rules.tasks[0], sampling=Sampling(0.25))
    world.rules = replace(world.rules, tasks=(changed,))
    judged: list[AnswerToScore] = []
    score = world._score

    def remembered(answer: AnswerToScore) -> Evidence:
        judged.append(answer)
        return score(answer)

    world._score = remembered  # type: ignore[method-assign]
    world.crash()
    world.connect("auditor", kind="auditor", slots=0)
    whole = {
        group
        for group, stored in world.ledger.groups.items()
        if len(stored.record.trajectories) == world.rules.group_size
    }
    world.drain()
    of_before = [each for each in judged if each.sampling == before]
    assert whole
    assert of_before
    assert {each.sampling for each in judged} <= {before, Sampling(0.25)}


def test_a_newcomer_holds_few_samples_until_it_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits_module, "TRIAL_MAX", 2)
    world = started("a", auditor=False)
    peer = world.peers["a"]
    assert (peer.slots, len(peer.open)) == (4, 2)
    while peer.open:
        world.say(peer, peer.finish(*peer.open[0]))
    world.drain()
    assert peer.open == []
    world.connect("auditor", kind="auditor", slots=0)
    world.drain()
    assert len(peer.open) == 2
    for _ in range(3):
        world.work()
        world.drain()
    assert world.standing("a") == "clear"
    train_on(world, 1)
    assert peer.peer in {t.worker for t in trajectories(world)}


def test_a_group_with_one_bad_verdict_is_not_complete() -> None:
    world = started("a", wait_s=3600.0)
    peer = world.peers["a"]
    lease = peer.leases[peer.open[0][0]]
    first, second = [each for each in peer.open if peer.leases[each[0]].group == lease.group][:2]
    world.handle(PeerDisconnected(world.peers["auditor"].session, "killed"))
    world.say(peer, peer.finish(*first))
    world.say(peer, peer.finish(*second, tokens=LIE))
    world.drain()
    world.connect("auditor", kind="auditor", slots=0)
    world.drain()
    assert world.returned == [SampleReturned(lease.group, second[1])]
    kept = world.ledger.groups[lease.group].record.trajectories
    assert [each.sample for each in kept] == [first[1]]
    assert world.state.status().groups.buffered == 0


def test_a_worker_that_the_learner_doubts_is_audited_like_a_flagged_one() -> None:
    world = started("a", "mine", newcomer=0)
    assert world.standing("a") == "new"
    publish_step(world, 1)
    publish_step(world, 2)
    assert world.standing("a") == "clear"
    record = next(t for t in trajectories(world) if t.worker == "a")
    world.audits.scored_by_learner([(record, TrajectoryScore(1, record.sample, 0.5, 0.0))])
    assert world.standing("a") == "clear"
    world.audits.scored_by_learner([(record, TrajectoryScore(1, record.sample, 6.0, 0.0))])
    assert world.standing("a") == "flagged"


def test_a_version_that_no_worker_can_score_puts_its_author_on_trial() -> None:
    """Its answers cannot be scored, so its next ones wait for a verdict."""
    world = started("liar", "mine", newcomer=0, share=1.0)
    liar = world.peers["liar"]
    versions = world.state._versions
    for record in list(versions.copies()):
        versions.lose(record.path)
    world.say(liar, liar.finish(*liar.open[0], tokens=LIE))
    world.drain()
    assert world.audits.skipped == 1
    assert world.standing("liar") == "new"
    world.say(liar, liar.finish(*liar.open[0], tokens=LIE))
    assert len(world.audits.waiting) == 1


def test_honest_answers_on_trial_excuse_no_lies() -> None:
    world = started("liar", "mine", newcomer=0, share=0.0)
    case, limits = world.audits.cases, world.audits.baseline.limits
    assert limits is not None
    lie, honest = (
        Evidence(3, 6.0, 0.0, 1.0, 0.0, 0.0, (3, 3, 3)),
        Evidence(3, 0.0, 0.0, 1.0, 0.0, 0.0, (0, 0, 0)),
    )
    for _ in range(4):
        assert case.judge(PeerId("liar"), lie, limits)[1] == ""
        for _ in range(200):
            case.judge(PeerId("liar"), honest, limits, drawn=False)
    assert case.judge(PeerId("liar"), lie, limits)[1]


def test_a_worker_that_refits_in_place_without_permission_is_convicted() -> None:
    """No clean prefill gives its logprobs, and the audit cannot tell that from other weights."""
    world = started("a", "mine", newcomer=0, share=1.0)
    train_on(world, 2)
    world.mixes.add("a")
    train_until_convicted(world)
    assert [each.worker for each in world.convicts] == ["a"]
    assert "logprobs" in world.convicts[0].reason


def test_answers_of_mixed_kv_have_their_own_limits() -> None:
    """They are learnt from trusted workers that refit in place too, and kept over a restart."""
    world = started("a", "mine", newcomer=0, share=1.0, in_place=True)
    train_on(world, 2)
    world.mixes |= {"a", "mine"}
    for _ in range(BASELINE_TRAJECTORIES):
        if world.audits.mixed.limits is not None:
            break
        status = world.state.status().audit
        assert status is not None
        assert status.learnt_mixed is not None
        assert (status.learnt, status.k_max_mixed) == (1.0, None)
        train_on(world, 1)
    assert world.audits.mixed.limits is not None
    assert limits_of(world, "torch, mixed KV").k > 5 * LEARNT.k
    assert limits_of(world, "torch") == LEARNT
    world.crash()
    assert world.audits.mixed.limits is not None
    assert world.audits.mixed.limits.k == limits_of(world, "torch, mixed KV").k
    train_on(world, 5)
    assert world.convicts == []
    assert not any(each.reasons for each in world.told), "an honest answer was flagged"
    # Its clean answers are still judged by the narrow limits.
    world.mixes = {"mine"}
    clean = Evidence(3, MIXED_K, 0.0, 1.0, 0.0, 0.0, (0, 0, 0))
    world._score = lambda answer: clean  # type: ignore[method-assign]
    train_until_convicted(world)
    assert [each.worker for each in world.convicts] == ["a"]


def test_workers_in_int8_have_their_own_limits() -> None:
    """They work once a trusted one has shown its answers; a restart keeps what was learnt."""
    world = started("b-int8", "mine-int8", "mine", newcomer=0, share=1.0, quantized=True)
    for _ in range(BASELINE_TRAJECTORIES):
        if not world.audits.learns("int8"):
            break
        assert not any(t.worker == "b-int8" for t in trajectories(world))
        assert any("int8 workers get no lease" in each for each in world.state.status().attention)
        train_on(world, 1)
    assert limits_of(world, "torch, int8").k > 2 * LEARNT.k
    assert limits_of(world, "torch") == LEARNT
    world.crash()
    assert not world.audits.learns("int8")
    train_on(world, 5)
    assert any(t.worker == "b-int8" for t in trajectories(world))
    assert world.convicts == []
    assert not any(each.reasons for each in world.told), "an honest answer was flagged"
    # Once it computes in full, it is judged by the narrow limits.
    world.peers["b-int8"].quantization = ""
    world.connect("b-int8", boot_id="another")
    found = Evidence(3, INT8_K, 0.0, 1.0, 0.0, 0.0, (0, 0, 0))
    world._score = lambda answer: found  # type: ignore[method-assign]
    train_until_convicted(world)
    assert [each.worker for each in world.convicts] == ["b-int8"]


def test_a_worker_with_an_invented_quantization_gets_no_work() -> None:
    world = started("mine", newcomer=0, quantized=True)
    for number in range(5):
        world.connect(f"liar-{number}", quantization=f"made-up-{number}")
    train_on(world, 3)
    assert not any(world.peers[f"liar-{number}"].leases for number in range(5))
    assert {kind.quantization for kind in world.audits._baselines} == {""}


def test_a_worker_in_int8_scores_no_version() -> None:
    world = started("a", "mine", auditor=False, newcomer=0, share=1.0, quantized=True)
    judge = world.connect("judge", trusted=True, quantization="int8")
    world.handle(PeerConnected(judge.session, judge.peer, replace(judge.hello(), scores=True)))
    train_on(world, 2)
    assert world.audits.scorers.scored == 0


def test_only_gross_lies_convict_until_limits_of_mixed_kv_are_learnt() -> None:
    world = started("liar", "mine", newcomer=0, share=1.0, in_place=True)
    train_on(world, 2)
    world.mixes.add("liar")
    train_on(world, 5)
    assert world.convicts == []
    assert world.audits.mixed.limits is None, "no trusted worker refits in place"
    world.liars.add("liar")
    train_until_convicted(world)
    assert [each.worker for each in world.convicts] == ["liar"]


def test_limits_of_mixed_versions_let_others_work_if_all_answers_mix_versions() -> None:
    world = started("a", "mine", learnt=False, in_place=True, newcomer=0)
    world.mixes |= {"a", "mine"}
    for _ in range(BASELINE_TRAJECTORIES):
        if not world.audits.learns():
            break
        assert not world.peers["a"].leases
        train_on(world, 1)
    assert world.audits.mixed.limits is not None
    assert world.audits.baseline.limits is None, "only the first answers were clean"
    train_on(world, 3)
    assert any(t.worker == "a" for t in trajectories(world))


def test_a_worker_that_takes_over_computes_kv_caches_itself() -> None:
    """So what it writes under one version is clean, whoever wrote the tokens before."""
    one, two = PeerId("one"), PeerId("two")

    def written(*authors: PeerId) -> TrajectoryRecord:
        spans = [
            AuthoredSpan(at, at + 1, Version(at), version_key(at).digest, author)
            for at, author in enumerate(authors)
        ]
        return TrajectoryRecord(0, bytes(4 * len(spans)), b"", tuple(spans), "stop")

    assert not audits_module._mixes(written(one, two, one), one)
    assert audits_module._mixes(written(one, two, two), two)
    assert not audits_module._mixes(written(one, two, two), one)


def test_a_sample_that_no_other_worker_can_write_begins_again_with_its_group() -> None:
    world = started("liar", newcomer=3)
    liar = world.peers["liar"]
    key, sample = liar.open[0]
    group = liar.leases[key].group
    world.say(liar, liar.finish(key, sample, tokens=LIE))
    world.work()
    assert world.returned == [SampleReturned(group, sample)]
    assert group in world.ledger.groups
    for _ in range(int(RETURNED_WAIT_S)):
        world.pass_time(1.01)
        world.say(liar, Heartbeat(0))
        world.say(world.peers["auditor"], Heartbeat(0))
        world.work()
    assert group not in world.ledger.groups
    train_on(world, 1)


def test_the_waiting_time_of_a_returned_sample_ignores_its_earlier_lease() -> None:
    world = started("liar", "mine", newcomer=3)
    liar, mine = world.peers["liar"], world.peers["mine"]
    key, sample = liar.open[0]
    group = liar.leases[key].group
    world.say(liar, liar.finish(key, sample, tokens=LIE))
    world.drain()
    assert world.returned == [SampleReturned(group, sample)]
    for _ in range(2):
        world.say(mine, mine.finish(*mine.open[0]))
    world.drain()

    def theirs() -> list[tuple[HeldLease, int]]:
        return [
            each for each in mine.open if (mine.leases[each[0]].group, each[1]) == (group, sample)
        ]

    def wait() -> None:
        for _ in range(int(RETURNED_WAIT_S)):
            world.pass_time(1.01)
            for peer in (liar, world.peers["auditor"]):
                world.say(peer, Heartbeat(0))
            for held, number in theirs():
                world.say(mine, mine.wrote(held, number))
            world.drain()

    assert theirs(), "the other worker writes it"
    wait()
    assert group in world.ledger.groups
    world.say(mine, Goodbye("its box is gone"))
    wait()
    assert group not in world.ledger.groups


def test_a_continuation_of_a_convicted_workers_tokens_is_not_accepted() -> None:
    world = started("liar", "mine", newcomer=0, share=0.0)
    liar, mine = world.peers["liar"], world.peers["mine"]
    key, sample = liar.open[0]
    group = liar.leases[key].group
    world.say(liar, liar.wrote(key, sample, 9, 9))
    world.handle(PeerDisconnected(liar.session, "gone"))
    world.pass_time(16.0)
    world.say(mine, Heartbeat(0))
    found = [
        (held, number)
        for held, number in mine.open
        if (mine.leases[held].group, number) == (group, sample) and mine.leases[held].written
    ]
    assert found
    world.audits.cases.of(PeerId("liar")).verdict = "caught"
    world.say(mine, mine.finish(*found[0]))
    kept = [t for t in trajectories(world) if any(s.author == "liar" for s in t.spans)]
    assert kept == []


def test_trust_and_convictions_are_known_before_the_first_hello() -> None:
    recovered = replace(
        Recovered.nothing(),
        convicted=frozenset([PeerId("liar")]),
        trusted=frozenset([PeerId("mine")]),
    )
    state = CoordinatorState(
        rules(
            audit=AuditRules(
                trusted=("t",),
            )
        ),
        recovered,
        plan_secret=bytes(PLAN_SECRET_BYTES),
        now=0.0,
    )
    assert state._audits is not None
    assert state._audits.standing(PeerId("mine")) == "trusted"
    assert state._audits.is_convicted(PeerId("liar"))


def test_a_clear_worker_gets_more_slots_as_more_of_its_answers_are_audited() -> None:
    world = started("a", newcomer=0, share=1.0)
    peer = world.state._members.get(PeerId("a"))
    assert peer is not None
    publish_step(world, 1)
    before = peer.service.slots_allowed
    train_on(world, 3)
    assert before is not None
    assert peer.service.slots_allowed is not None
    assert peer.service.slots_allowed > before
