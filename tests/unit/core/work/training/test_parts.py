"""The books of the run's groups: one for each task, where the ledger says."""

from dataclasses import replace

from echo2d.core.coordinator.events import Recovered
from echo2d.core.coordinator.parts import make_parts
from echo2d.core.work.events import PromptGivenBack, TaskProgress
from echo2d.core.work.training.parts import make_training_parts
from tests.support.coordinator_world import RULES, rules


def test_each_task_draws_prompts_from_its_own_cursor_on() -> None:
    first = RULES.tasks[0]
    the_rules = rules(tasks=(replace(first, name="a"), replace(first, name="b")))
    recovered = replace(
        Recovered.nothing(),
        tasks=(TaskProgress("a", 40, b"", b""), TaskProgress("b", 7, b"", b"")),
        given_back=(PromptGivenBack("a", 31),),
    )
    run = make_parts(the_rules, recovered, tag=7, plan_secret=bytes(32), now=0.0)
    books = make_training_parts(
        run, recovered, staleness=run.staleness, scheduler=run.scheduler, audits=None
    )
    assert set(books.prompts) == {"a", "b"}
    drawn = {name: books.prompts[name].ask(3) for name in ("a", "b")}
    cursors = {name: [each.cursor for each in asked] for name, asked in drawn.items()}
    assert cursors == {"a": [31, 40, 41], "b": [7, 8, 9]}
