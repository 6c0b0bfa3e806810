"""A stand-in for `echo2d.client.Coordinator`: the learner's side of the coordinator's promises, in this process.

Its trajectories are true under the version that their span names: a right and a wrong answer in turn, with logprobs
computed from the published files. The version of batch n is the oldest published one at or above n - 1 - `lag`.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo2d.client import (
    Batch,
    Evaluation,
    Group,
    NotResumable,
    Published,
    Sampling,
    Session,
    Span,
    StepFigures,
    Trajectory,
    TrajectoryScore,
)
from echo2d.learner.model.load import load_model
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.tasks.sort_digits import EOS, SortDigits, answer
from tests.support.polling import HANG_S

GROUPS = GROUP_SIZE = 4

Change = Callable[[Batch], Batch]


class ScriptedCoordinator:
    run_id = "run"

    def __init__(self, root: Path, *, publish_every: int = 1, lag: int = 0) -> None:
        self.root = root  # where it keeps what was published
        root.mkdir(exist_ok=True)
        self.publish_every = publish_every
        self.lag = lag
        self.kappa_answered = publish_every
        self.events: list[tuple[str, int]] = []
        self.refused: dict[int, str] = {}
        self.scores: dict[int, Sequence[TrajectoryScore]] = {}  # by step
        self.figures: dict[int, StepFigures | None] = {}  # by step
        self.spoil: dict[
            int, Change
        ] = {}  # step -> what happens to its batch before the first refusal
        self.on_commit: Callable[[int], None] = lambda step: None
        self.lowest = 0  # step to resume at
        self.temperatures: Sequence[float] = (1.0,)  # of the groups of a batch, in turn
        self.samplings: dict[str, Sampling] = {}
        self.answer_tokens = 0
        self.evals: dict[int, list[Evaluation]] = {}  # by the step after whose commit they come
        self.unfinished: list[list[str]] = []  # for each next call of `evaluate`; afterwards none
        self._epoch = 0
        self._committed = 0
        self._batches: dict[int, Batch] = {}
        self._versions: dict[int, Path] = {}
        self._models: dict[int, Any] = {}
        self._changed = threading.Condition()

    def load(self, directory: Path) -> Any:
        """The policy that was published there."""
        return load_model(directory)

    def open_session(self, resume_step: int, **_: object) -> Session:
        if resume_step < self.lowest:
            raise NotResumable(f"cannot resume: batches up to step {self.lowest} are deleted")
        self._epoch += 1
        self._committed = resume_step
        self.events.append(("session", resume_step))
        return Session(
            epoch=self._epoch,
            run_id=self.run_id,
            staleness_max=2,
            publish_every=self.publish_every,
            trajectories_per_step=GROUPS * GROUP_SIZE,
            group_size=GROUP_SIZE,
            group_min=GROUP_SIZE,
            checkpoint=0,
            samplings=self.samplings,
            answer_tokens=self.answer_tokens,
            evaluations=["held"] * bool(self.evals),
        )

    def publish(self, version: int, directory: Path, manifest: bytes | None = None) -> Published:
        taken = self.root / f"{self._epoch}-{version}"
        taken.mkdir()
        for path in directory.iterdir():
            (taken / path.name).hardlink_to(path)
        model = self.load(
            taken
        )  # here, in the learner's thread: transformers cannot load two models at a time
        with self._changed:
            self._versions[version] = taken
            self._models[version] = model
            self._changed.notify_all()
        self.events.append(("publish", version))
        return Published(version, "00")

    def take_batch(self, step: int) -> Batch:
        assert step <= self._committed + 2
        with self._changed:
            if step not in self._batches:
                assert self._changed.wait_for(
                    lambda: max(self._versions) >= step - 1 - self.lag, HANG_S
                )
                version = min(
                    version for version in self._versions if version >= step - 1 - self.lag
                )
                self._batches[step] = make_batch(
                    self._models[version], step, version, self.temperatures
                )
        batch = dataclasses.replace(self._batches[step], epoch=self._epoch)
        return self.spoil[step](batch) if step in self.spoil else batch

    def commit(
        self,
        batch: Batch,
        *,
        t_train_s: float,
        scores: Sequence[TrajectoryScore] = (),
        figures: StepFigures | None = None,
    ) -> int:
        assert batch.step == self._committed + 1
        assert t_train_s > 0
        self._committed = batch.step
        self.scores[batch.step], self.figures[batch.step] = scores, figures
        self.events.append(("commit", batch.step))
        self.on_commit(batch.step)
        return self.kappa_answered

    def refuse(self, batch: Batch, reasons: dict[int, str]) -> None:
        self.refused = reasons
        del self.spoil[batch.step]

    def checkpoint(self, step: int) -> None:
        self.events.append(("checkpoint", step))

    def hurry(self) -> None:
        """It never waits."""

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        self.events.append(("samples", step or 0))
        return []

    def evaluations(self, after: int = 0) -> list[Evaluation]:
        told = [each for step, its in self.evals.items() if step <= self._committed for each in its]
        return [each for each in told if each.number > after]

    def evaluate(self, version: int, after: int = 0) -> tuple[list[Evaluation], list[str]]:
        self.events.append(("evaluate", version))
        return self.evaluations(after), self.unfinished.pop(0) if self.unfinished else []

    def published(self, version: int) -> Path:
        return self._versions[version]

    def said(self, what: str) -> list[int]:
        return [number for event, number in self.events if event == what]


def make_batch(
    model: Any, step: int, version: int, temperatures: Sequence[float] = (1.0,)
) -> Batch:
    """What `model`, being this version, might have written for this step.

    temperatures: of the groups, in turn.
    """
    task = SortDigits(rng_seed=step)
    groups = []
    for index in range(GROUPS):
        prompt, heat = task.prompt(index), temperatures[index % len(temperatures)]
        right = answer(prompt.tokens)
        wrong = (*right[1:-1], right[0], EOS)
        outputs = [right if sample % 2 else wrong for sample in range(GROUP_SIZE)]
        trajectories = [
            _trajectory(
                model, prompt.tokens, tokens, task.reward(prompt, tokens), version, sample, heat
            )
            for sample, tokens in enumerate(outputs)
        ]
        groups.append(
            Group(
                GROUPS * step + index,
                np.array(prompt.tokens, dtype=np.int32),
                tuple(trajectories),
                sampling=Sampling(heat),
            )
        )
    return Batch(step=step, epoch=0, digest=f"batch-{step}", groups=tuple(groups))


def _trajectory(
    model: Any,
    prompt: Any,
    output: tuple[int, ...],
    reward: float,
    version: int,
    sample: int,
    heat: float,
) -> Trajectory:
    tokens_bt = np.array([[*prompt, *output]], dtype=np.int64)
    answer_bt = np.arange(tokens_bt.shape[1])[None] >= len(prompt)
    with torch.inference_mode():
        logprobs = answer_logprobs(model, tokens_bt, answer_bt, heat)
    return Trajectory(
        tokens=np.array(output, dtype=np.int32),
        logprobs=logprobs.numpy(),
        spans=(Span(0, len(output), version, "00"),),
        reward=reward,
        worker="worker",
        sample=sample,
    )


def answer_logprobs(
    model: Any,
    tokens_bt: NDArray[np.int64],
    answer_bt: NDArray[np.bool_],
    temperature: float | NDArray[np.float32],
) -> Tensor:
    """log p [n] of each answer token over the full vocabulary: float32, with gradient. Every answer has its row."""
    return AnswerScorer(model, packing=False).score(tokens_bt, answer_bt, temperature).logprobs_n
