"""Supervised fine-tuning, `echo2d learn --sft`: the rows of a run's task as the batches of its learner.

    run.toml --> rows --chat template--> prompt | answer | given | answer --> groups of one trajectory

`SftSource` stands where the coordinator stands. A step's rows follow from its number: each epoch has every row once, in
an order by task.options.rng_seed. So a learner that resumes goes on in the same order. The last step of the last epoch
is filled up with rows of the next one.
Not here: the held-out loss (`sft_train`), and the tokens of a conversation (`echo2d.texts.turns`).
"""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from blake3 import blake3

from echo2d.client import Batch, Group, OperatorFault, Session, Span, Trajectory, require_model
from echo2d.config.coordinator import CoordinatorConfig
from echo2d.config.run import RunTable
from echo2d.config.tables import folder_of, meant, read_table, read_toml, table_of, with_settings
from echo2d.config.tasks import EvalTable, TaskTable
from echo2d.core.base.model_config import context_max
from echo2d.core.rules.table import Table, key
from echo2d.learner.config import LearnerConfig
from echo2d.learner.saving.files import store_faults
from echo2d.learner.saving.identity import DAY_FILE
from echo2d.tasks.base import TextPrompt
from echo2d.tasks.rows.task import Demonstrations, RowsOptions
from echo2d.tasks.served_task import ModelFiles, make_turn_texts
from echo2d.texts.continuation import NoContinuation
from echo2d.texts.files import text_digest
from echo2d.texts.model_texts import UnusableText
from echo2d.texts.turns import Demonstration

if TYPE_CHECKING:
    from torch import Tensor

    from echo2d.learner.objective.token_weights import WeightInputs

# The objective: the mean of -log p over the answer tokens of a step, at one optimizer step each.
_OBJECTIVE: Mapping[str, Any] = {
    "objective": "grpo", "loss": f"{__name__}:cross_entropy", "loss_mean": "token", "advantages": "",
    "advantage_std": "sample", "kl_coef": 0.0, "entropy_coef": 0.0, "optimizer_steps": 1, "teacher": None,
    "track_samples_every": 0,
}  # fmt: skip

log = logging.getLogger("echo2d.learner")


def cross_entropy(inputs: "WeightInputs") -> "Tensor":
    """The loss of each token [n]; a `learner.loss`."""
    return -inputs.logprobs_n


@dataclass(frozen=True, slots=True, kw_only=True)
class SftTable(Table):
    """The keys of [sft] that are not keys of [learner]."""

    TABLE: ClassVar[str] = "sft"

    rows: dict[str, Any] = key(
        "options of the rows that differ from those of the [task], such as files, messages or answer",
        dict,
    )
    rows_per_step: int = key("rows of a train step", 32, low=1)
    epochs: int = key("how often each row is trained, unless sft.steps is given", 1, low=1)
    heldout_every: int = key("train steps between two measurements of the held-out loss", 20, low=1)


@dataclass(frozen=True, slots=True)
class SftConfig:
    """What --sft reads from a file."""

    table: SftTable
    learner: LearnerConfig
    steps: int  # 0: the number of rows decides, and `learner` has another number
    system: str
    template: Mapping[str, Any]
    rows: Mapping[str, Any]  # options
    # Options of rows, and the most that are asked (0: all): of the held-out rows, if there are any; and of all that are
    # not trained, which are also those of each [[eval]] of rows.
    measured: Sequence[tuple[Mapping[str, Any], int]]
    asked: Sequence[tuple[Mapping[str, Any], int]]

    @staticmethod
    def load(path: Path, settings: Iterable[str] = ()) -> "SftConfig":
        """OperatorFault: a key is wrong, or the run has no rows."""
        document, folder = with_settings(read_toml(path), settings), folder_of(path)
        given = table_of(document, SftTable.TABLE)
        of_learner = {each.name for each in fields(LearnerConfig)} & given.keys()
        table = read_table(SftTable, {name: given[name] for name in given.keys() - of_learner})
        given = {name: given[name] for name in of_learner}
        run = CoordinatorConfig.read(document, folder) if RunTable.TABLE in document else None
        tasks = () if run is None else run.tasks
        places = [place for place, each in enumerate(tasks) if each.kind == "rows"]
        if len(places) != 1 and "files" not in table.rows:
            kinds = ", ".join(each.kind for each in tasks) or "none"
            raise OperatorFault(
                f"--sft: expected one [task] of kind rows, or sft.rows.files; found {kinds}"
            )
        place = places[0] if places else 0
        task = tasks[place] if tasks else TaskTable(kind="rows")
        # The model learns to write the whole text of the column. Messages of [sft] have their answers themselves.
        whole = {"answer_after": "", **({"answer": ""} if table.rows.get("messages") else {})}
        of_task, own = (task.options if places else {}), {**whole, **table.rows}
        options = {**of_task, **own}
        names = [each.name or each.kind for each in tasks]
        evals = [] if run is None else [(run.task_of(each, names), each) for each in run.evals]
        tests = [each for of, each in evals if of == place and "files" not in table.rows]
        if not tests and options.get("held_out"):
            tests = [EvalTable()]
        measured = [_test(folder, each, of_task, own) for each in tests[:1]]
        asked = [_test(folder, each, tasks[of].options) for of, each in evals if of in places]
        return SftConfig(
            table,
            _learner(document, folder, given),
            given.get("steps", 0),
            task.system,
            task.template,
            _placed(options, folder),
            measured,
            [*measured, *asked],
        )


def _test(
    folder: Path, table: EvalTable, of_task: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], int]:
    """The options of the rows of an evaluation, and how many it asks. own: options that count instead of its own."""
    test = {**of_task, "split": "heldout", **table.options}
    return _placed({**test, **(own or {}), "split": test["split"]}, folder), table.rows


def _placed(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The options with the files of this folder. OperatorFault: a name or a value is wrong."""
    known = [each.name for each in fields(RowsOptions)]
    if unknown := [name for name in options if name not in known]:
        raise OperatorFault(f"rows: {unknown[0]}: unknown option; {meant(unknown[0], known)}")
    files = RowsOptions(**{"files": (), **options}).files
    listed = [files] if isinstance(files, str) else files
    return {**options, "files": [str(folder / Path(each).expanduser()) for each in listed]}


def _learner(document: Mapping[str, Any], folder: Path, given: Mapping[str, Any]) -> LearnerConfig:
    """The [learner] table with the keys that [sft] gives instead. OperatorFault: it gives one that has no effect."""
    of_run = {**table_of(document, LearnerConfig.TABLE)}
    out_dir = Path(given.get("out_dir", Path(of_run.get("out_dir", "learner")) / "sft"))
    if ignored := given.keys() & {*_OBJECTIVE, "snapshot_root"}:
        found = f"found {given[name := min(ignored)]!r}: leave it out"
        raise OperatorFault(f"sft.{name}: expected nothing, because --sft does not use it; {found}")
    own = {"lr": 1e-5, "steps": 1, "token_file": "", "step_floor_s": 0.0, **given}
    own |= {"out_dir": str(out_dir), "snapshot_root": str(out_dir / "snapshots"), **_OBJECTIVE}
    if "checkpoint_url" not in given and (url := of_run.get("checkpoint_url")):
        own["checkpoint_url"] = f"{str(url).rstrip('/')}/sft"
    return LearnerConfig.of({**document, LearnerConfig.TABLE: {**of_run, **own}}, folder)


class SftSource:
    """Gives rows as batches. Its methods are those of `Coordinator` that a learner needs.

    config: the learner's, with `steps`. OperatorFault: the rows, or the model's tokenizer, cannot be used.
    """

    def __init__(self, read: SftConfig) -> None:
        model, table = read.learner.model, read.table
        require_model(model, trains=True)
        facts = {"template": None, "system": read.system, "options": read.template}
        self._day_file = read.learner.out_dir / DAY_FILE
        self._day = _day(self._day_file)
        files = ModelFiles.read({"directory": str(model), "day": self._day, **facts})
        if "tokenizer.json" not in files.files:
            raise OperatorFault(f"learner.model: {model} has no tokenizer.json")
        self._turns, self._system, self._table = make_turn_texts(files), read.system, table
        self._read_max = context_max(json.loads(files.files["config.json"])) or 0
        self._rows = Demonstrations(**read.rows)
        asked = set[str]().union(*(Demonstrations.asked(*each) for each in read.asked))
        left_out = self._rows.leave_out(asked) if asked else []
        if left_out:
            log.info("left out rows=%d: the run evaluates the model on them", len(left_out))
        self.held_out = next((self._held_out(*each) for each in read.measured), None)
        steps = read.steps or math.ceil(table.epochs * len(self._rows) / table.rows_per_step)
        self.config = replace(read.learner, steps=steps)
        told = [{**read.rows, "files": self._rows.digest.hex()}, facts, table.rows_per_step]
        told += [text_digest(model).hex(), *left_out]
        # A learner resumes only from checkpoints of the run of this name: the same rows in the same order.
        digest = blake3(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
        self.run_id = f"sft-{digest[:12]}"
        self._lengths = self._measured()

    def _measured(self) -> list[tuple[int, int, str]]:
        """Tokens of prompt and of output of each row, and where it is from."""
        log.info("reading rows=%d", len(self._rows))
        found, partly = [], list[str]()
        # In the order of the files, which are read in pieces.
        for row in self._rows.conversations():
            where, tokens = self._demonstration(row)
            found.append((len(tokens.prompt), len(tokens.output), where))
            partly += [] if tokens.whole else [where]
        if partly:
            log.warning(
                "only the last answer is trained of rows=%d, e.g. %s: the chat template changes their earlier answers, "
                "or cannot go on after them", len(partly), partly[0],
            )  # fmt: skip
        if self.held_out is None:
            log.warning("there is no held-out loss: set sft.rows.held_out, e.g. to 0.05")
        asked = () if self.held_out is None else self.held_out.groups
        answers = ((len(group.prompt), group.trajectories[0]) for group in asked)
        return found + [(prompt, len(answer.tokens), answer.row) for prompt, answer in answers]

    def _demonstration(self, found: TextPrompt) -> tuple[str, Demonstration]:
        """Where the row is from, and its tokens. OperatorFault: it cannot be trained."""
        messages = [*found.messages]
        if self._system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            return found.where, self._turns.demonstration(messages)
        except (UnusableText, NoContinuation) as fault:
            raise OperatorFault(f"rows: {found.where}: {fault.detail}") from fault

    def fitting(self, config: LearnerConfig) -> LearnerConfig:
        """The config with the most tokens of a row. OperatorFault: rows are longer, and are not to be truncated."""
        most = config.row_tokens_max or self._read_max
        longer = [row for row in self._lengths if most and row[0] + row[1] > most]
        if not longer:
            return config
        prompt, output, where = max(longer, key=lambda row: row[0])
        said = (
            f"{len(longer)} of {len(self._lengths)} rows have more than {most} tokens, e.g. {where}"
        )
        if config.too_long == "refuse" or prompt >= most:
            raise OperatorFault(
                f"learner.row_tokens_max: {said} ({prompt} of the prompt, {output} of the answer); leave them out, or "
                'train their first tokens with learner.too_long = "truncate", if some of these are of the answer'
            )
        log.warning("truncated: %s; only their first tokens are trained", said)
        return replace(config, row_tokens_max=most)

    def rules(self, resume_step: int = 0) -> Session:
        rows, out_dir = self._table.rows_per_step, self.config.out_dir
        names = [path.name for path in (out_dir / "checkpoints").glob("step-*-epoch-*[0-9]")]
        epoch = 1 + max((int(name.rpartition("-")[2]) for name in names), default=0)
        # A prompt may be longer than the 2,048 tokens that a plan of memory assumes.
        answer = max(max(output, prompt + output - 2048) for prompt, output, _ in self._lengths)
        return Session(epoch, self.run_id, 0, 1, rows, 1, 1, resume_step, answer_tokens=answer)

    def open_session(self, resume_step: int, **_: object) -> Session:
        if not self._day_file.exists():
            with store_faults("cannot write", self._day_file):
                self._day_file.parent.mkdir(parents=True, exist_ok=True)
                self._day_file.write_text(self._day)
        return self.rules(resume_step)

    def take_batch(self, step: int) -> Batch:
        count = self._table.rows_per_step
        return self._batch(self._rows, range((step - 1) * count, step * count), step)

    def _held_out(self, options: Mapping[str, Any], most: int) -> Batch:
        rows = Demonstrations(**options)
        return self._batch(rows, range(min(most or len(rows), len(rows))), 1)

    def _batch(self, rows: Demonstrations, indices: Sequence[int], step: int) -> Batch:
        groups = (_group(n, *self._demonstration(rows.conversation(n)), step) for n in indices)
        return Batch(step, 1, f"rows-{indices[0]}", tuple(groups))

    def refuse(self, batch: Batch, reasons: Mapping[int, str]) -> None:
        """OperatorFault: always, because no other row can take the place of one."""
        where = {group.group_id: group.trajectories[0].row for group in batch.groups}
        number, reason = next(iter(reasons.items()))
        raise OperatorFault(f"rows: {where[number]}: {reason}; leave it out")

    def commit(self, batch: Batch, **_: object) -> int:
        """The steps per publish, which here is a measurement: 1 if it is due after this step."""
        return 1 if batch.step % self._table.heldout_every == 0 else self.config.steps

    def checkpoint(self, step: int) -> None:
        """Ignored: the checkpoints of out_dir say where to resume."""

    def hurry(self) -> None:
        """Ignored: no call waits."""


def _day(file: Path) -> str:
    """The day that chat templates show: that of the first start, so that a learner that resumes has the same tokens.

    OperatorFault: the file has no day.
    """
    if not file.exists():
        return datetime.now(UTC).date().isoformat()
    try:
        return date.fromisoformat(file.read_text().strip()).isoformat()
    except (OSError, ValueError) as error:
        raise OperatorFault(f"{file}: expected a day such as 2026-11-28; found {error}") from error


def _group(number: int, where: str, tokens: Demonstration, step: int) -> Group:
    output = np.array(tokens.output, dtype=np.int32)
    edges = [0, *chain(*tokens.given), len(output)]
    spans = [Span(a, b, step - 1, "") for a, b in zip(edges[::2], edges[1::2], strict=True)]
    facts: dict[str, Any] = {
        "given": tokens.given,
        "turns": len(spans),
        "task": "sft",
        "row": where,
    }
    # Nothing reads the logprobs and the reward.
    answer = Trajectory(output, np.zeros(len(output), np.float32), tuple(spans), 0.0, "", **facts)
    return Group(number, np.array(tokens.prompt, dtype=np.int32), (answer,))
