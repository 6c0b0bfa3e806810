"""How verifiers' records are used. With the real package: tests/nightly/envs."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from echo2d.runtime.envs.verifiers_player import RowsOf, calls_of, joined, outcome_of


def node(parent: int | None, token_ids: list[int], mask: list[bool]) -> Any:
    return SimpleNamespace(parent=parent, token_ids=token_ids, mask=mask)


def call(at: int | None, *, end: float = 0.0) -> Any:
    return SimpleNamespace(node=at, time=SimpleNamespace(end=end))


def trace(*, trainable: bool = True, reward: float = 0.5, **changes: Any) -> Any:
    nodes = [node(None, [5], [False]), node(0, [6, 7, 8], [False, True, True])]
    made: dict[str, Any] = {
        "agent": SimpleNamespace(trainable=trainable),
        "rewards": {"right": SimpleNamespace(value=reward)},
        "metrics": {"turns": 1.0, "unknown": None},
        "reward": reward,
        "nodes": nodes,
        "calls": [call(None), call(1)],
        "last_error": None,
    }
    return SimpleNamespace(**{**made, **changes})


def episode(*traces: Any, ok: bool = True, last_error: Any = None) -> Any:
    return SimpleNamespace(traces=list(traces), ok=ok, last_error=last_error)


def test_an_episode_has_the_reward_the_parts_and_the_branches_of_its_trace() -> None:
    body = outcome_of(episode(trace())).body()
    assert body["reward"] == 0.5
    assert body["parts"] == {"right": 0.5, "turns": 1.0}
    assert body["trace"] == [{"token_ids": [5, 6, 7, 8], "written": [[2, 4]]}]


def test_several_trained_agents_get_the_mean_of_their_rewards() -> None:
    user = trace(trainable=False, reward=9.0)
    body = outcome_of(episode(trace(reward=1.0), user, trace(reward=0.0))).body()
    assert (body["reward"], body["parts"]["right"], len(body["trace"])) == (0.5, 0.5, 2)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (episode(trace(), ok=False), "not ok"),
        (episode(ok=False, last_error=SimpleNamespace(type="E", message="m")), "E: m"),
        (
            episode(trace(last_error=SimpleNamespace(type="T", message="late")), ok=False),
            "T: late",
        ),
        (episode(trace(trainable=False)), "no agent"),
        (episode(trace(rewards={"right": None})), "right"),
        (episode(trace(rewards={})), "all"),
    ],
)
def test_an_episode_without_a_judgement_is_an_error_and_not_a_reward_of_zero(
    made: Any, said: str
) -> None:
    body = outcome_of(made).body()
    assert list(body) == ["error"]
    assert said in body["error"]


def test_calls_come_in_the_order_of_their_answers_with_all_tokens_on_their_path() -> None:
    nodes = [
        node(None, [1], [False]),
        node(0, [2, 3], [False, True]),
        node(1, [4], [False]),
        node(2, [5, 6], [True, True]),
        node(0, [7, 8], [False, True]),
    ]
    first = trace(nodes=nodes, calls=[call(1, end=1.0), call(3, end=2.0), call(4, end=4.0)])
    second = trace(nodes=[node(None, [9, 9], [False, True])], calls=[call(0, end=3.0)])
    assert calls_of([first, second]) == [
        ([1, 2], [3]),
        ([1, 2, 3, 4], [5, 6]),
        ([9], [9]),
        ([1, 7], [8]),
    ]


def test_a_call_that_extends_the_newest_branch_goes_on_with_it() -> None:
    made = joined(
        [([1, 2], [3]), ([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 9], [7]), ([1, 2, 3, 4, 5, 6], [8])]
    )
    assert [(each.token_ids, each.written) for each in made] == [
        ([1, 2, 3, 4, 5, 6], [(2, 3), (4, 6)]),
        ([1, 2, 3, 9, 7], [(4, 5)]),
        ([1, 2, 3, 4, 5, 6, 8], [(6, 7)]),
    ]
    assert joined([]) == []


def test_rows_are_repeated_and_endless_rows_are_read_as_far_as_needed() -> None:
    rows = RowsOf("abc")
    assert [rows[row] for row in (1, 3, 5, 0)] == ["b", "a", "c", "a"]
    assert RowsOf(itertools.count())[70] == 70
    with pytest.raises(IndexError):
        RowsOf([])[0]
