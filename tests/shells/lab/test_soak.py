"""The parts of `echo2d bench soak`: its draws, its expected alerts, its books. The soak itself takes an hour."""

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from echo2d.errors import OperatorFault
from echo2d_lab.bench.soak.alert_watch import AlertBook, ExpectedAlert
from echo2d_lab.bench.soak.books import balance, dropped_groups
from echo2d_lab.bench.soak.counts import CountQuestion, Inside, ProcessCounts
from echo2d_lab.bench.soak.learner import SoakBatches
from echo2d_lab.bench.soak.plan import OVER_S, WEIGHTS, SoakPlan
from echo2d_lab.bench.soak.report import SoakReport
from echo2d_lab.bench.soak.seats import SoakAnswers


def test_each_kind_of_fault_is_drawn_and_over_before_a_count() -> None:
    plan = SoakPlan()
    before, between = plan.troubles(0), plan.troubles(1)
    assert {trouble.kind for trouble in before} == set(WEIGHTS)
    assert {trouble.kind for trouble in between} == set(WEIGHTS) - {"kill_coordinator"}
    first, last = plan.ends_s
    assert all(trouble.at_s <= first - OVER_S for trouble in before)
    assert all(first < trouble.at_s <= last - OVER_S for trouble in between)
    assert before == SoakPlan().troubles(0) != SoakPlan(rng_seed=1).troubles(0)


def test_a_soak_that_is_too_short_is_the_operators_mistake() -> None:
    with pytest.raises(OperatorFault, match="expected at least 12"):
        SoakPlan(minutes=3)


def alert(kind: str, subject: str) -> dict[str, object]:
    return {"alerts": [{"kind": kind, "subject": subject, "sentence": f"{subject} {kind}"}]}


def test_late_and_unexplained_alerts_are_reported() -> None:
    prompt = ExpectedAlert("learner_silent", "", 0.0, 60.0, within_s=30.0)
    late = ExpectedAlert("worker_silent", "gpu-7", 0.0, 60.0, within_s=30.0)
    never = ExpectedAlert("peer_build", "strange", 0.0, 60.0, within_s=30.0)
    may = ExpectedAlert("seed_away", "", 0.0, 60.0)
    book = AlertBook([prompt, late, never, may])
    book.look(alert("learner_silent", ""), 10.0)
    book.look(alert("worker_silent", "gpu-7"), 40.0)
    book.look(alert("worker_silent", "gpu-8"), 41.0)
    book.look(alert("worker_silent", "gpu-7"), 61.0)
    assert book.missing() == [late, never]
    assert list(book.unexpected) == [("worker_silent", "gpu-8"), ("worker_silent", "gpu-7")]
    assert book.seen == {"learner_silent": 1, "worker_silent": 1}


def test_an_alert_about_several_workers_is_explained_by_each_and_the_status_names_them() -> None:
    first = ExpectedAlert("peer_build", "strange-1", 0.0, 60.0, within_s=30.0)
    second = ExpectedAlert("peer_build", "strange-2", 0.0, 60.0, within_s=30.0)
    book = AlertBook([first, second])
    book.look({**alert("peer_build", ""), "other_builds": [{"name": "strange-1"}]}, 10.0)
    assert book.unexpected == {}
    assert book.missing() == [second]
    book.look({**alert("peer_build", ""), "other_builds": [{"name": "strange-3"}]}, 61.0)
    assert list(book.unexpected) == [("peer_build", ""), ("peer_build", "strange-3")]


def test_an_alert_that_could_not_be_seen_is_not_missing() -> None:
    book = AlertBook([ExpectedAlert("learner_silent", "", 0.0, 60.0, within_s=30.0)])
    book.look(alert("seed_away", ""), 61.0)
    assert book.missing() == []


def test_an_alert_due_when_the_coordinator_is_killed_need_not_come() -> None:
    came = ExpectedAlert("worker_silent", "gpu-7", 0.0, 60.0, within_s=30.0)
    on_its_way = ExpectedAlert("learner_silent", "", 20.0, 80.0, within_s=30.0)
    overdue = ExpectedAlert("peer_build", "strange", 0.0, 60.0, within_s=30.0)
    book = AlertBook([came, on_its_way, overdue])
    book.look(alert("worker_silent", "gpu-7"), 40.0)
    book.coordinator_killed(41.0)
    book.look(alert("worker_silent", "gpu-7"), 61.0)
    assert book.missing() == [came, overdue]


def test_the_books_find_what_is_lost_doubled_or_changed() -> None:
    written, trained = SoakAnswers(), SoakBatches()
    written.accepted = {b"a": (1, 0), b"b": (1, 1), b"c": (2, 0), b"d": (3, 0), b"e": (4, 0)}
    trained.steps = {1: {(1, 0): b"a", (1, 1): b"other"}, 2: {(1, 0): b"a"}}
    books = balance(written, trained, dropped={2}, stored={1, 3})
    assert (books.accepted, books.dropped, books.stored) == (5, 1, 1)
    assert (books.lost, books.repeated, books.changed) == (((4, 0),), ((1, 0),), ((1, 1),))
    assert len(books.faults()) == 3


def test_an_accepted_answer_is_lost_if_its_group_was_trained_without_it() -> None:
    """Also while the ledger still has its group."""
    written, trained = SoakAnswers(), SoakBatches()
    written.accepted = {b"a": (1, 0), b"b": (1, 1)}
    trained.steps = {1: {(1, 0): b"a"}}
    books = balance(written, trained, dropped=set(), stored={1})
    assert (books.stored, books.lost) == (0, ((1, 1),))


def test_dropped_groups_are_read_from_a_json_log() -> None:
    lines = ['{"kind": "dropped", "group": 7, "message": "dropped group=7"}', '{"kind": "frozen"}']
    assert dropped_groups(lines) == {7}


@dataclass
class Kept:
    """An object that the garbage collector tracks."""

    held: list[int]


def test_a_process_is_counted_from_outside_and_reports_from_inside(tmp_path: Path) -> None:
    question = CountQuestion(tmp_path / "counts")
    kept = [Kept([]) for _ in range(150)]
    thread = threading.Thread(target=question.answer_once)
    found = []
    asker = threading.Thread(target=lambda: found.append(question.ask()))
    asker.start()
    thread.start()
    asker.join()
    thread.join()
    (inside,) = found
    assert inside.objects > 1000
    assert inside.by_type[f"{__name__}.Kept"] == len(kept)
    gc.collect()
    counts = ProcessCounts.of(os.getpid(), inside)
    assert counts.rss_mb > 10
    assert counts.threads >= 1
    assert counts.files >= 1


def counts(**more: int) -> ProcessCounts:
    facts = {"rss_mb": 50.0, "threads": 4, "sockets": 300, "files": 20, **more}
    return ProcessCounts(1, inside=Inside(1000, facts.pop("tasks", 40), {}), **facts)  # type: ignore[arg-type]


def test_more_sockets_tasks_or_memory_at_the_second_count_are_leaks() -> None:
    def faults(now: ProcessCounts, minutes: float = 60.0) -> list[str]:
        books = balance(SoakAnswers(), SoakBatches(), set(), set())
        both = ({"coordinator": (counts(sockets=299), counts())}, {"coordinator": (now, now)})
        return SoakReport(SoakPlan(minutes), {}, books, both, (), (), {}).faults()

    assert faults(counts()) == []
    assert faults(counts(sockets=300 - 1)) == []
    assert faults(counts(sockets=301)) == ["coordinator holds 301 sockets instead of 299 to 300"]
    assert faults(counts(tasks=41)) == ["coordinator holds 41 tasks instead of 40"]
    assert faults(counts(rss_mb=61)) == ["coordinator holds 11.0 MB more memory"]
    assert faults(counts(rss_mb=61), minutes=15) == [], "histories still fill"


def test_a_real_worker_may_hold_a_link_to_each_other_one_and_to_the_seed() -> None:
    def faults(sockets: int) -> list[str]:
        books = balance(SoakAnswers(), SoakBatches(), set(), set())
        both = ({"real-0": (counts(sockets=6),)}, {"real-0": (counts(sockets=sockets),)})
        return SoakReport(SoakPlan(real=4), {}, books, both, (), (), {}).faults()

    assert faults(8) == []
    assert faults(9) == ["real-0 holds 9 sockets instead of 6"]
