"""The real core with a worker that takes time: the samples that patience leaves out, and the times of batches."""

from collections.abc import Sequence

import pytest

from echo2d.client import read_batch
from echo2d.core.base.canonical import digest_of
from echo2d.core.protocol.control_messages import VersionKey
from echo2d.core.rules.tasks import TaskRules
from echo2d.tasks.base import Prompt
from echo2d.tasks.sort_digits import EOS
from echo2d_lab.bench.lab.in_process import Written
from echo2d_lab.bench.lab.timed_process import TimedProcess
from tests.support.coordinator_world import rules

PROMPT = (3, 4)
SHORT, LONG = 4, 40  # tokens; each takes a second
GROUP, PATIENCE, T_TRAIN_S = 8, 3.0, 20.0
REVIEW_S = 1.0  # the core looks at what is due at least this often


class OnePrompt:
    name = "one_prompt"
    stop_token_ids: Sequence[int] = (EOS,)

    def prompt(self, index: int) -> Prompt:
        return Prompt(PROMPT)

    def reward(self, prompt: Prompt, output: Sequence[int]) -> float:
        return float(len(output) == LONG)


class Scribe:
    """One answer of each group is long."""

    def refit(self, version: VersionKey) -> None:
        """It writes the same by every version."""

    def write(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[int]
    ) -> list[list[Written]]:
        lengths = [SHORT] * (GROUP - 1) + [LONG]
        group = [Written([5] * (each - 1) + [EOS], [-0.5] * each) for each in lengths]
        assert list(samples) == [GROUP] * len(prompts)
        return [group for _ in prompts]


def play(patience: float, steps: int) -> tuple[TimedProcess, list[float], list[int]]:
    """The run, when each batch came, and how many answers it has."""
    numbers = {
        "staleness_max": 4, "publish_every": 1, "trajectories_per_step": GROUP, "group_size": GROUP, "shape": "star",
        "group_patience": patience, "filter_zero_variance": False, "heartbeat_s": 1e9,
        "tasks": (TaskRules(max_new_tokens=2 * LONG, stop_token_ids=(EOS,)),),
    }  # fmt: skip
    run = TimedProcess(
        rules(**numbers), OnePrompt(), Scribe(), [PROMPT], slots=8 * GROUP, takes_s=float
    )
    run.open_session()
    run.publish(0, digest_of(b"0"))
    came, answers = [], []
    for step in range(1, steps + 1):
        body, digest = run.take(step)
        (group,) = read_batch(1, digest.hex(), body).groups
        came.append(run.now)
        answers.append(len(group.trajectories))
        run.commit(step, digest, T_TRAIN_S)
        run.publish(step, digest_of(str(step).encode()))
        run.state.check()
    return run, came, answers


@pytest.mark.parametrize(
    ("patience", "first_s", "answers"),
    [(0.0, LONG, GROUP), (PATIENCE, PATIENCE * SHORT, GROUP - 1)],
)
def test_a_batch_comes_when_its_answers_are_written_or_patience_is_over(
    patience: float, first_s: float, answers: int
) -> None:
    run, came, found = play(patience, 3)
    assert first_s <= came[0] <= first_s + REVIEW_S
    assert found == [answers] * 3
    lost = {len(written.tokens) for _, written in run.cancelled}
    assert lost == (set() if patience == 0.0 else {LONG})
    assert {prompt for prompt, _ in run.began} == {PROMPT}


def test_a_train_step_takes_its_time_and_answers_arrive_meanwhile() -> None:
    _, came, _ = play(PATIENCE, 4)
    assert came[1:] == [came[0] + T_TRAIN_S * step for step in (1, 2, 3)]


def test_the_same_timed_run_gives_the_same_result_again() -> None:
    assert play(PATIENCE, 5)[1:] == play(PATIENCE, 5)[1:]
