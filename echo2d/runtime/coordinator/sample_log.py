"""The sample log of a run: every scored group with its prompt, answers and rewards as text.

    <run_dir>/samples.jsonl, samples.1.jsonl, ...   (`store/json_log.py`)

    records --tell--> open groups --frozen in a batch, or filtered--> queue --a thread--> one line

It is for people to look at (`echo2d samples`): no decision depends on it, and a restart does not read
it. Files are private (0600), because prompts and answers may be private. Text is decoded from the tokens
that are trained on, special tokens included, with the tokenizer of `run.base_model`. Without a tokenizer
a line has token ids.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo2d.core.base.ids import GroupId
from echo2d.core.coordinator.events import CoordinatorRecord
from echo2d.core.protocol.trajectory import Source, StoredGroup, TrajectoryRecord, unpack_tokens
from echo2d.core.work.events import (
    BatchFrozen,
    GroupDropped,
    PromptTaken,
    SampleKept,
    SampleLeftOut,
    SampleReturned,
    SampleRewarded,
)
from echo2d.errors import OperatorFault, StoreFault
from echo2d.runtime.coordinator.shown_samples import ShownSamples, mean_reward
from echo2d.runtime.run_dir.run_directory import existing_run
from echo2d.store.json_log import JsonLog, read_json_log
from echo2d.texts.files import read_text_files
from echo2d.texts.model_texts import ModelTexts

SAMPLE_LOG = "samples"

log = logging.getLogger("echo2d.samples")


@dataclass(slots=True)
class _LoggedGroup:
    """A group that may be logged."""

    group: GroupId
    prompt: bytes
    source: Source
    samples: dict[int, TrajectoryRecord]  # the answers, by their number


class SampleLog:
    """See the module docstring.

    groups: the groups that are open when the coordinator starts. texts: if None, the lines have token ids.
    """

    def __init__(
        self, files: JsonLog, groups: Iterable[StoredGroup], texts: ModelTexts | None
    ) -> None:
        self._files, self._texts = files, texts
        # What the page and the boards show.
        self.shown = ShownSamples()
        self._open = {each.record.group: _of_stored(each) for each in groups}
        # Groups that wait for the disk. The queue has room for those of a few large batches;
        # further groups are not logged.
        self._waiting: asyncio.Queue[tuple[_LoggedGroup, int | None, str]] = asyncio.Queue(4096)

    def tell(self, record: CoordinatorRecord) -> None:
        """Take a record that is durable."""
        match record:
            case PromptTaken(group, _, prompt, source):
                self._open[group] = _LoggedGroup(group, prompt, source, {})
            case SampleKept(group, trajectory=kept) if group in self._open:
                self._open[group].samples[kept.sample] = kept
            case SampleRewarded(group, sample, reward, parts) if group in self._open:
                samples = self._open[group].samples
                if sample in samples:
                    samples[sample] = samples[sample].scored(reward, parts)
            case SampleReturned(group, sample) | SampleLeftOut(group, sample) if (
                group in self._open
            ):
                self._open[group].samples.pop(sample, None)
            case GroupDropped(group, reason):
                self._end(group, None, reason.partition(":")[0])
            case BatchFrozen(step, groups=groups):
                for group in groups:
                    self._end(group, step, "")
            case _:
                pass

    async def keep(self) -> None:
        """Write lines until cancelled."""
        while True:
            ended = [await self._waiting.get()]
            ended += [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]
            lines = await asyncio.to_thread(self._lines, ended)
            self.shown.add(lines)
            try:
                await asyncio.to_thread(self._files.append, lines)
            except StoreFault as fault:
                log.warning("the samples of %d groups are not logged: %s", len(ended), fault)

    # --- inside

    def _end(self, group: GroupId, step: int | None, dropped: str) -> None:
        found = self._open.pop(group, None)
        # A group that was dropped unscored has nothing to show.
        if found is None or dropped not in ("", "filtered"):
            return
        try:
            self._waiting.put_nowait((found, step, dropped))
        except asyncio.QueueFull:
            log.warning("a group is not logged: the disk is too slow")

    def _lines(self, ended: Sequence[tuple[_LoggedGroup, int | None, str]]) -> list[dict[str, Any]]:
        now_s = round(time.time(), 3)
        return [
            {"at": now_s, "step": step, "dropped": dropped or None, **self._line(each)}
            for each, step, dropped in ended
        ]

    def _line(self, group: _LoggedGroup) -> dict[str, Any]:
        return {
            "group": group.group,
            "task": group.source.task,
            "row": group.source.row,
            "prompt": self._text(group.prompt),
            "samples": [self._sample(group.samples[at]) for at in sorted(group.samples)],
        }

    def _sample(self, kept: TrajectoryRecord) -> dict[str, Any]:
        return {
            "sample": kept.sample,
            "reward": kept.reward,
            "parts": {part.name: part.value for part in kept.reward_parts},
            "answer": self._text(kept.tokens),
            "tokens": kept.length,
            "finish": kept.finish,
            "versions": [kept.version_min, kept.version_max],
            "worker": kept.worker,
        }

    def _text(self, packed: bytes) -> str | list[int]:
        tokens = unpack_tokens(packed).tolist()
        return tokens if self._texts is None else self._texts.decode(tokens)


def open_sample_log(
    run_dir: Path, bytes_max: int, groups: Iterable[StoredGroup], model: Path | None
) -> SampleLog:
    """The sample log of a run, with the tokenizer of `model` if it has one that can be read. Blocking.

    OperatorFault: a file of the model cannot be read.
    """
    files, texts = {} if model is None else read_text_files(model), None
    if "tokenizer.json" in files:
        try:
            texts = ModelTexts(files)
        except OperatorFault as fault:
            # A run whose tasks are in tokens needs no tokenizer; a task in text has refused to start by now.
            log.warning("samples are shown as token ids: %s", fault)
    return SampleLog(JsonLog(run_dir, SAMPLE_LOG, bytes_max), groups, texts)


def read_samples(
    run_dir: Path, *, step: int | None = None, filtered: bool = False, worst: bool = False
) -> list[dict[str, Any]]:
    """Lines of a run's log, the newest first, or with `worst` the lowest mean reward first.

    step: only groups of this train step. filtered: only groups that were filtered. OperatorFault: there is
    no run, or a file cannot be read.
    """
    existing_run(run_dir)
    found = [
        line
        for line in read_json_log(run_dir, SAMPLE_LOG)
        if (step is None or line["step"] == step) and (not filtered or line["dropped"])
    ]
    if worst:
        return sorted(found, key=mean_reward)
    return found[::-1]


def _of_stored(stored: StoredGroup) -> _LoggedGroup:
    record = stored.record
    samples = {each.sample: each for each in record.trajectories}
    return _LoggedGroup(record.group, record.prompt, stored.source, samples)
