"""The answers that wait for an auditor, and the order of their scoring."""

from dataclasses import replace

import numpy as np
import pytest

from echo2d.core.audit import scoring_queue
from echo2d.core.audit.scoring_queue import (
    ANSWERS_MAX,
    FAIR_TURN,
    SCORED_VERSIONS_MAX,
    SCORING_PATIENCE_S,
    TRIES_MAX,
    AnswerPart,
    AuditItem,
    ScoringQueue,
)
from echo2d.core.audit.waiting_samples import WaitingSample
from echo2d.core.base.codec import MESSAGE_BYTES_MAX
from echo2d.core.base.ids import Digest, GroupId, PeerId, Version
from echo2d.core.protocol.control_messages import TO_PEER, AnswerToScore, ScoreAnswers
from echo2d.core.protocol.experts import column_of
from tests.support.coordinator_world import version_key

KEYS = {version_key(number) for number in range(20)}


def part(version: int, *, urgent: bool = False, worker: str = "w", at: float = 0.0) -> AnswerPart:
    waiting = WaitingSample(GroupId(1), 0, at) if urgent else None
    item = AuditItem(PeerId(worker), GroupId(1), 0, (version,), waiting, 1)
    return AnswerPart(
        item, version_key(version), AnswerToScore(b"1234", b"12345678", b"", 0, 1), at
    )


def queue_of(*parts: AnswerPart) -> ScoringQueue:
    queue = ScoringQueue()
    for each in parts:
        assert queue.put(each) == []
        queue.check()
    return queue


def take(
    queue: ScoringQueue,
    *,
    loaded: int = -1,
    newest: int = 9,
    now: float = 1e6,
    tokens_max: int = 1 << 20,
) -> list[int]:
    """The versions of the next order."""
    loads = version_key(loaded) if loaded >= 0 else None
    order = queue.take(
        KEYS, loaded=loads, newest=version_key(newest), tokens_max=tokens_max, now=now
    )
    queue.check()
    return [each.key.version for each in order]


def test_urgent_answers_come_first_then_those_of_the_loaded_version_then_the_oldest() -> None:
    queue = queue_of(part(1), part(2), part(3, urgent=True), part(4, urgent=True))
    assert take(queue, loaded=4) == [4]
    assert take(queue, loaded=4) == [3]
    assert take(queue, loaded=2) == [2]
    assert take(queue, loaded=2) == [1]
    assert take(queue) == []


def test_the_newest_version_is_loaded_for_answers_that_are_not_urgent_after_a_while() -> None:
    queue = queue_of(part(5, at=10.0))
    assert take(queue, loaded=4, newest=5, now=10.0 + SCORING_PATIENCE_S - 0.1) == []
    assert queue.due_at(version_key(5)) == 10.0 + SCORING_PATIENCE_S
    assert take(queue, loaded=4, newest=5, now=10.0 + SCORING_PATIENCE_S) == [5]
    assert take(queue_of(part(5, at=10.0)), loaded=5, newest=5, now=10.0) == [5]


def test_an_older_version_is_loaded_at_once_for_its_answers() -> None:
    queue = queue_of(part(5, at=10.0))
    assert queue.due_at(version_key(6)) == 10.0
    assert take(queue, loaded=6, newest=6, now=10.0) == [5]


def test_workers_on_trial_do_not_keep_all_others_from_being_audited() -> None:
    queue = queue_of(*(part(5, urgent=True) for _ in range(400)), part(1), part(1))
    orders = [take(queue) for _ in range(FAIR_TURN)]
    assert orders[-1] == [1, 1]
    assert all(set(order) == {5} for order in orders[:-1])


def test_an_order_also_holds_answers_that_are_not_urgent_up_to_a_limit() -> None:
    urgent = part(5, urgent=True)
    queue = queue_of(*(part(5) for _ in range(ANSWERS_MAX)), urgent)
    order = queue.take(KEYS, loaded=None, newest=None, tokens_max=1 << 20, now=0.0)
    assert (len(order), order[0], len(queue)) == (ANSWERS_MAX, urgent, 1)


def test_an_order_is_as_large_as_its_auditor_is_fast() -> None:
    queue = queue_of(*(part(5) for _ in range(10)))
    assert len(take(queue, tokens_max=3 * part(5).tokens)) == 3
    assert len(take(queue, tokens_max=0)) == 1


def test_an_order_is_limited_in_bytes_but_holds_at_least_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring_queue, "ORDER_BYTES_MAX", 45)
    queue = queue_of(*(part(1) for _ in range(3)))
    assert take(queue) == [1, 1]
    monkeypatch.setattr(scoring_queue, "ORDER_BYTES_MAX", 1)
    assert take(queue) == [1]


def test_a_version_that_an_auditor_cannot_score_is_left_to_others() -> None:
    queue = queue_of(part(1), part(2))
    order = queue.take({version_key(2)}, loaded=None, newest=None, tokens_max=9, now=1e6)
    assert [each.key.version for each in order] == [2]


def test_the_oldest_of_too_many_versions_is_dropped() -> None:
    queue = queue_of(*(part(number) for number in range(SCORED_VERSIONS_MAX)))
    lost = queue.put(part(SCORED_VERSIONS_MAX))
    assert [each.key.version for each in lost] == [0]
    queue.check()
    assert [each.key.version for each in queue.lose(version_key(1))] == [1]
    queue.check()


def test_the_queue_is_limited_in_bytes_and_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tired = part(1)
    tired.tries = TRIES_MAX
    assert queue_of().put(tired) == [tired]
    monkeypatch.setattr(scoring_queue, "BYTES_MAX", 30)
    queue, second = queue_of(part(1)), part(1)
    assert queue.put(second) == [second]


def test_answers_of_a_forgotten_worker_leave_the_queue() -> None:
    queue = queue_of(part(1, worker="liar"), part(1), part(2, worker="liar"))
    assert len(queue.forget(PeerId("liar"))) == 2
    queue.check()
    assert (len(queue), list(queue.versions())) == (1, [version_key(1)])


def test_answers_of_a_failed_order_are_tried_one_by_one() -> None:
    tried = [part(1), part(1)]
    for each in tried:
        each.tries = 1
    queue = queue_of(*tried, part(1))
    assert [take(queue) for _ in range(4)] == [[1], [1], [1], []]


def test_an_order_of_answers_with_their_experts_fits_into_a_message() -> None:
    """Each answer has 96 kB of experts, and 1 kB of all else."""
    tokens = 256
    column = column_of(np.zeros((tokens, 48, 8), dtype=np.uint8), experts=128)
    answer = AnswerToScore(bytes(4), bytes(4 * tokens), bytes(4 * tokens), 0, 1, columns=(column,))
    parts = [replace(part(1), answer=answer) for _ in range(ANSWERS_MAX)]
    order = queue_of(*parts).take(
        KEYS, loaded=None, newest=version_key(9), tokens_max=1 << 20, now=1e6
    )
    assert 1 < len(order) < ANSWERS_MAX
    message = ScoreAnswers(
        1, Version(1), Digest(bytes(32)), "", "torch", tuple(each.answer for each in order)
    )
    assert len(TO_PEER.encode(message)) < MESSAGE_BYTES_MAX
