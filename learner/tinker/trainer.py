"""Run the training calls of the Tinker API on one model, one after the other.

    create, load            a new slot or whole model (`whole_model`), under the client's name of the model
    forward_backward        the logprobs of all targets, and the gradient added to that of the slot, unless forward_only
    optim_step, discard     apply the gradient, or drop it; after a step the slot's state is written (`states`)
    save                    its directory in learner.out_dir/tinker/RUN_ID
    publish                 saved weights, or the base model, as a version that workers serve
    score                   what a client asks of a prompt, under saved weights or the base model
    score_sample            the most likely tokens at each position of a drawn sample, under the weights that drew it
    keep                    free all other models, and delete all other directories

A call is checked before anything is computed, so a call that the client got wrong changes nothing.

Several ranks share the base model and a whole model (FSDP2), and each has all slots. They run the same calls in step:

    checks             on all ranks; if they fail on one rank, the call fails on all
    forward_backward   each rank runs its share of the rows, and keeps its part of the gradient
    optim_step         the parts are added up; then each rank takes the same step
    files, versions    by rank 0 alone; those of a whole model by all together

A rank that fails inside a layer leaves the others waiting there, so all processes end. The next learner answers this
call with the failure (`fatal_call`).

The models end with this process. For each model a later learner is told to load the state of its last written step, or
to create it again, and then to run what came after.

Datums are packed into rows as answers are (`batch.packing`): each is a piece of its own, whose positions begin at 0. A
model that cannot keep them apart gets a row for each.

Suffixes of names: b = rows of a micro-batch, t = positions, n = targets of a micro-batch, one datum after the other.
"""

import contextlib
import gc
import json
import logging
import os
import random
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from echo2d.client import (
    OperationFailed,
    OperationResult,
    OperatorFault,
    StoreFault,
    TinkerOperation,
    base_digest,
)
from echo2d.core.base.model_config import context_max
from echo2d.learner.config import LearnerConfig, Place
from echo2d.learner.model.load import read_weights
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Ranks, Rendezvous, device_of, own_shard
from echo2d.learner.saving.files import (
    ASIDE,
    make_directory,
    remove_directory,
    store_faults,
    whole_directory,
)
from echo2d.learner.tinker.datums import (
    CheckedDatum,
    laid_out,
    rows_of,
    staleness_metrics,
    staleness_of,
    with_top_tokens,
)
from echo2d.learner.tinker.fatal_call import FatalCall
from echo2d.learner.tinker.slots import (
    PUBLISHED_FILES,
    Adam,
    Slot,
    Slots,
    SlotShape,
    TrainedWeights,
    write_slot,
)
from echo2d.learner.tinker.states import SlotStates
from echo2d.learner.tinker.sums import (
    TARGETS,
    Loss,
    Targets,
    WrongCall,
    check_tokens,
    given_of,
    loss_with,
    targets_of,
)
from echo2d.learner.tinker.whole_model import (
    WholeModel,
    WholeModels,
    check_version,
    scorer_of,
    take_version,
)
from echo2d.logs import say
from echo2d.tinker.prompt_reader import PromptReader
from echo2d.tinker.wire import (
    Datum,
    read_forward_backward,
    read_prompt_call,
    read_sample_result,
    write_forward_backward_output,
    write_prompt_scores,
    write_sample_result,
)

# Models at a time. One of rank 32 on a model of 8 billion parameters takes 1.3 GB.
MODELS_MAX = 64
# All of them may take this share of the memory beside the base model; the passes need the rest.
SLOTS_SHARE_MAX = 0.5
# Targets of one datum and of one call. The head holds a hidden state for each of those of a datum, and the result has
# four bytes for each of those of a call.
TARGETS_MAX, CALL_TARGETS_MAX = 1 << 18, 1 << 22
# Slots of saved weights in memory.
SCORED_SLOTS_MAX = 4
FOLDER = re.compile("[0-9a-f]{1,64}")

log = logging.getLogger("echo2d.learner")


class Trainer:
    """The base model, and the models of clients. OperatorFault: the configuration does not fit."""

    def __init__(
        self,
        config: LearnerConfig,
        publish: Callable[[int, Path], object] | None = None,
        run_id: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        """publish: makes a directory a version that workers serve. run_id: whose checkpoints these are. Both are those
        of rank 0. ranks: what `Rendezvous.join` returned; None: this process is the only rank.
        """
        self._publish = publish
        if config.compile:
            raise OperatorFault("learner.compile: expected false with --serve; found true")
        if config.threads:
            torch.set_num_threads(config.threads)
        ranks = ranks or Ranks(device=device_of(config.device, Place()))
        self.ranks, self.broken = ranks, False
        if ranks.device.type == "cuda":
            # As `Policy` does: products of float32 factors use TF32.
            torch.set_float32_matmul_precision("high")
        self._config, self._device = config, ranks.device
        self._scorer, self._layout = scorer_of(config, ranks, config.model, trained=False)
        self.model = self._scorer.model
        # The folder of full weights that the model has now (""): its own; None: reading failed.
        self._filled: str | None = ""
        digest = ranks.share(lambda: base_digest(config.model))
        self._factory = Slots(self.model, config.model, digest)
        self._wholes = WholeModels(config, ranks, self._layout, self.model, digest)
        # Draws the seeds that clients leave open, the same ones on all ranks.
        self._seeds = random.Random(ranks.share(lambda: secrets.randbits(63)))
        self._slots: dict[str, TrainedWeights] = {}
        self.states = SlotStates()
        self._slots_bytes_max = SLOTS_SHARE_MAX * _memory_beside(self.model, ranks)
        # Slots of saved weights by folder, that score prompts.
        self._scored: dict[str, Slot] = {}
        self._vocabulary = int(self.model.config.get_text_config().vocab_size)
        read_max = context_max(json.loads((config.model / "config.json").read_bytes()))
        self._tokens_max = min(read_max or TARGETS_MAX, config.row_tokens_max or TARGETS_MAX)
        self._root = config.out_dir / "tinker" / ranks.share(lambda: run_id)
        # The shape of the adapter that was published last. For another shape engines build their model again.
        self._published = SlotShape(rank=32, train_attn=True, train_mlp=True)
        ranks.share(self._make_root)
        self._fatal = ranks.share(lambda: FatalCall.read(self._root))
        self._warned = False  # that some layers are not trained
        self._undeleted: set[Path] = set()  # directories of which it has been said

    @property
    def models(self) -> int:
        return len(self._slots)

    def run(self, operation: TinkerOperation) -> OperationResult:
        """The result of one call, in the form that `Coordinator.end_operation` takes. That of forward_backward is only
        on rank 0.

        WrongCall, Malformed: the client got it wrong. Any other exception: this learner did. A gradient may then lack a
        part, and the coordinator drops it. If `broken` is set then, the ranks are not in step any more and must end.
        """
        if self._fatal is not None and self._fatal.is_of(operation):
            return OperationFailed(self._fatal.line, "server")
        try:
            return self.ranks.all_or_none(lambda: self._checked_call(operation))()
        except BaseException as error:
            # The call itself did not fail: without an answer, the next learner gets it again.
            self.broken |= Rendezvous.is_lost_rank(error)
            if operation.kind == "optim_step" and operation.model in self._slots:
                # The next step must not have the gradient of this one.
                self._slots[operation.model].discard()
            raise

    def _checked_call(self, operation: TinkerOperation) -> Callable[[], OperationResult]:
        """Do the part of a call in which ranks do not talk to each other, and return the rest."""
        model, arguments, body = operation.model, operation.arguments, operation.body
        slot = self._slots.get(model)
        match operation.kind:
            case "create":
                return self._in_step(operation, self._create(model, arguments))
            case "load":
                return self._in_step(operation, self._load(model, arguments))
            case "publish":
                return partial(self.ranks.share, partial(self._publish_snapshot, arguments))
            case "score":
                return self._in_step(operation, self._score(arguments, body))
            case "score_sample":
                return self._in_step(operation, self._score_sample(arguments, body))
            case "keep":
                return partial(self._keep_only, arguments["models"], arguments["folders"])
            case _ if slot is None:
                return _failing(f"model {model} is not in the learner's memory")
            case "forward_backward":
                computed = self._forward_backward(model, slot, arguments, body)
                return self._in_step(operation, computed)
            case "optim_step":
                return self._in_step(operation, self._optim_step(operation, slot))
            case "discard":
                return partial(self._discard, slot)
            case "save":
                save = self._save(model, slot, arguments)
                return self._in_step(operation, save, (WrongCall, StoreFault))
        return _failing(f"this learner does not know the call {operation.kind!r}")

    def _in_step(
        self,
        operation: TinkerOperation,
        compute: Callable[[], OperationResult],
        told: tuple[type[Exception], ...] = (WrongCall,),
    ) -> Callable[[], OperationResult]:
        """For a part that ranks compute together: a failure of one rank of several sets `broken`. told: the exceptions
        that leave the ranks in step.
        """

        def run() -> OperationResult:
            try:
                return compute()
            except told:
                raise
            except Exception as error:
                self.broken = self.ranks.size > 1
                if self.broken and not Rendezvous.is_lost_rank(error):
                    FatalCall.of(operation, error).write(self._root)
                raise

        return run

    def _tell(self, level: int, what: str, **facts: object) -> None:
        """Log it, once for all ranks."""
        if self.ranks.leads:
            say(log, level, what, **facts)

    def _make_root(self) -> None:
        make_directory("out_dir", self._root)
        for left in self._root.glob(f"{ASIDE}*"):
            shutil.rmtree(left, ignore_errors=True)

    def _create(self, model: str, arguments: Mapping[str, Any]) -> Callable[[], OperationResult]:
        names = "rank", "train_attn", "train_mlp", "train_unembed"
        shape = SlotShape(**{name: arguments[name] for name in names})
        drawn = self._seeds.getrandbits(63)
        self._check_room(model, shape)
        if not shape.rank:
            return partial(self._make_whole, model, self._wholes.create)
        slot = self._factory.create(
            shape, drawn if arguments["seed"] is None else arguments["seed"]
        )
        idle = self._factory.idle(shape)
        if idle and not self._warned and self.ranks.leads:
            self._warned = True
            log.warning(
                "not trained: %s; such layers of this model get no adapter", ", ".join(idle)
            )

        def keep() -> OperationResult:
            self._slots[model] = slot
            self._tell(logging.INFO, "created", model=model, rank=shape.rank)
            return {}

        return keep

    def _load(self, model: str, arguments: Mapping[str, Any]) -> Callable[[], OperationResult]:
        began_at = time.monotonic()
        directory, optimizer = self._directory(arguments), arguments["optimizer"]
        shape = self._factory.shape_of(directory)
        self._check_room(model, shape)
        if not shape.rank:
            self._wholes.check(directory, optimizer=optimizer)
            load = partial(self._wholes.load, directory, optimizer=optimizer)
            return partial(self._make_whole, model, load)
        slot = self._factory.load(directory, optimizer=optimizer)

        def keep() -> OperationResult:
            self._slots[model] = slot
            shape = {"rank": slot.shape.rank, "steps": slot.steps}
            told = {"folder": directory.name, "seconds": _since(began_at)}
            self._tell(logging.INFO, "loaded", model=model, **shape, **told)
            return {"rank": slot.shape.rank}

        return keep

    def _make_whole(self, model: str, make: Callable[[], WholeModel]) -> OperationResult:
        began_at = time.monotonic()
        # The one whose place it takes goes first. A model refers to itself.
        self._slots.pop(model, None)
        gc.collect()
        made = self._slots[model] = make()
        told = {"rank": 0, "steps": made.steps, "seconds": _since(began_at)}
        self._tell(logging.INFO, "made", model=model, **told)
        return {"rank": 0}

    def _check_room(self, model: str, shape: SlotShape) -> None:
        """WrongCall: a model of this shape would be one too many, or too large. It replaces one of the same name."""
        others = [each for name, each in self._slots.items() if name != model]
        if len(others) >= MODELS_MAX:
            raise WrongCall(f"expected at most {MODELS_MAX} models at a time; one must end first")
        if not shape.rank and any(isinstance(each, WholeModel) for each in others):
            raise WrongCall("one model of full weights at a time: another one must end first")
        own = self._factory.memory_of(shape) if shape.rank else self._wholes.memory
        needed, most = sum(each.memory for each in others) + own, self._slots_bytes_max
        if needed > most:
            raise WrongCall(
                f"expected at most {most / 1e9:.3g} GB for the weights of all models with their optimizer states; "
                f"with this one they need {needed / 1e9:.3g} GB"
            )

    def _keep_only(self, models: Collection[str], folders: Collection[str]) -> OperationResult:
        over = self._slots.keys() - models
        for model in over:
            # So that its last state is deleted, too.
            self.states.wait_for(model)
            del self._slots[model]
        if over:
            gc.collect()
        self.ranks.share(lambda: self._keep_folders(folders))
        return {}

    def _keep_folders(self, folders: Collection[str]) -> None:
        for directory in self._root.iterdir():
            # Other names are not ours.
            if not FOLDER.fullmatch(directory.name) or directory.name in folders:
                continue
            left = remove_directory(directory)
            if left is not None and left not in self._undeleted:
                self._undeleted.add(left)
                log.warning("cannot delete %s: delete it by hand", left)

    def _optim_step(
        self, operation: TinkerOperation, slot: TrainedWeights
    ) -> Callable[[], OperationResult]:
        """Apply the gradient, and have the state written to the folder of the order, unless it names none."""
        model, settings = operation.model, dict(operation.arguments)
        folder = settings.pop("folder", "")
        directory = self._directory({"folder": folder}) if folder else None
        adam = Adam(**settings)

        def step() -> OperationResult:
            began_at, tokens, spent_s = time.monotonic(), slot.tokens, slot.seconds
            norm = slot.step(adam, self.ranks.add_up)
            said = {"step": slot.steps, "grad_norm": f"{norm:.4g}", "tokens": tokens}
            seconds = spent_s + time.monotonic() - began_at
            self._tell(logging.INFO, "stepped", model=model, **said, seconds=f"{seconds:.1f}")
            if directory is not None:
                self._write_state(operation, slot, directory)
            return {"metrics": {"grad_norm": norm}, "tokens": tokens, "seconds": seconds}

        return step

    def _write_state(
        self, operation: TinkerOperation, slot: TrainedWeights, directory: Path
    ) -> None:
        written = operation.model, operation.number, directory
        if isinstance(slot, WholeModel):
            if self.ranks.share(lambda: slot.state_due):
                self.states.wait_for(operation.model)
                copied = self._wholes.copy_fits(slot)
                self.states.write(*written, partial(self._wholes.copy, slot, copied=copied))
                if not copied:
                    self.states.wait_for(operation.model)
        elif self.ranks.leads:
            assert isinstance(slot, Slot)
            self.states.write(*written, partial(self._copied, slot))

    def _copied(self, slot: Slot) -> Callable[[Path], int]:
        return partial(write_slot, files=self._factory.files_of(slot, optimizer=True))

    def _discard(self, slot: TrainedWeights) -> OperationResult:
        slot.discard()
        return {}

    def _save(
        self, model: str, slot: TrainedWeights, arguments: Mapping[str, Any]
    ) -> Callable[[], OperationResult]:
        directory, optimizer = self._directory(arguments), arguments["optimizer"]

        def write() -> int:
            if isinstance(slot, WholeModel):
                if self.ranks.highest(int(not slot.finite)):
                    raise WrongCall("the weights are not finite: load an earlier checkpoint")
                return self._wholes.save(slot, directory, optimizer=optimizer)
            assert isinstance(slot, Slot)
            files = self._factory.files_of(slot, optimizer=optimizer)
            return self.ranks.share(lambda: write_slot(directory, files))

        def save() -> OperationResult:
            began_at, written = time.monotonic(), write()
            told = {"folder": directory.name, "bytes": written, "seconds": _since(began_at)}
            self._tell(logging.INFO, "saved", model=model, steps=slot.steps, **told)
            return {"bytes": written, "steps": slot.steps}

        return save

    def _publish_snapshot(self, arguments: Mapping[str, Any]) -> OperationResult:
        if self._publish is None:
            return OperationFailed("this learner publishes nothing", "server")
        with self._snapshot(arguments) as directory:
            self._publish(arguments["version"], directory)
        return {}

    @contextlib.contextmanager
    def _snapshot(self, arguments: Mapping[str, Any]) -> Iterator[Path]:
        """A directory to publish, with saved weights, or with an adapter that changes nothing (folder: "")."""
        directory = self._config.snapshot_root / f"tinker-{arguments['version']}"
        remove_directory(directory)
        with store_faults("cannot write the snapshot", directory):
            with whole_directory(directory, durable=False) as aside:
                if arguments["folder"]:
                    source = self._directory(arguments)
                    shape = self._factory.shape_of(source)
                    if shape.rank:
                        self._published = shape
                        for name in PUBLISHED_FILES:
                            shutil.copy(source / name, aside)
                    else:
                        take_version(source, aside)
                else:
                    self._factory.write_nothing(aside, self._published)
            try:
                yield directory
            finally:
                remove_directory(directory)

    def _directory(self, arguments: Mapping[str, Any]) -> Path:
        """WrongCall: the folder's name is not hexadecimal."""
        if not FOLDER.fullmatch(folder := str(arguments["folder"])):
            raise WrongCall(f"folder: expected at most 64 hex digits; found {folder[:80]!r}")
        return self._root / folder

    def _forward_backward(
        self, model: str, slot: TrainedWeights, arguments: Mapping[str, Any], body: bytes
    ) -> Callable[[], OperationResult]:
        began_at, call = time.monotonic(), read_forward_backward(body)
        learns = not call.head.forward_only
        loss = loss_with(call.head.loss, call.config)
        data = [
            self._check(place, each, loss, learns=learns) for place, each in enumerate(call.data)
        ]
        stale = staleness_of(call.data, model, slot.steps)
        oldest, most = max((each for each, _ in stale), default=0), arguments.get("staleness_max")
        if learns and most is not None and oldest > most:
            raise WrongCall(
                f"tokens are {oldest} optimizer steps older than the model; expected at most {most}"
            )
        targets = sum(each.targets.size for each in data)
        if targets > CALL_TARGETS_MAX:
            raise WrongCall(
                f"{TARGETS}: expected at most {CALL_TARGETS_MAX} in a call; found {targets}"
            )
        tokens = sum(len(each.tokens_t) for each in data)
        if isinstance(slot, Slot):
            self._fill("")

        def compute() -> OperationResult:
            # The factor turns a mean into a sum.
            factor = self.ranks.size if slot.averaged else 1
            with self._using(slot) as scorer, torch.set_grad_enabled(learns):
                own = self._own_share(data, loss, scorer, factor if learns else 0)
            parts = self.ranks.gather(own)
            if learns and isinstance(slot, WholeModel):
                slot.unsaved += len(body)
            if learns:
                slot.tokens += tokens
                slot.seconds += time.monotonic() - began_at
            told = {"loss_fn": call.head.loss, "tokens": tokens, "seconds": _since(began_at)}
            self._tell(logging.DEBUG, "computed", model=model, forward_only=not learns, **told)
            if not parts:
                return {}
            logprobs = {place: found for _, some in parts for place, found in some.items()}
            total = sum(each for each, _ in parts)
            sums = {"loss:sum": total, "tokens:sum": float(tokens)}
            metrics = {**sums, **staleness_metrics(stale)}
            ordered = [logprobs[place] for place in range(len(data))]
            return write_forward_backward_output(ordered, metrics)

        return compute

    @contextlib.contextmanager
    def _using(self, slot: TrainedWeights | None) -> Iterator[AnswerScorer]:
        """What runs this model in the block, backward passes included. None: the model that `_fill` has filled."""
        if isinstance(slot, WholeModel):
            yield slot.scorer
            return
        assert slot is None or isinstance(slot, Slot)
        with self._factory.using(slot):
            yield self._scorer

    def _fill(self, folder: str) -> None:
        """Give the frozen model the full weights in this folder; empty: its own. It reads them if it has others."""
        if self._filled == folder:
            return
        directory = self._directory({"folder": folder}) if folder else self._config.model
        self._filled = None
        read_weights(self.model.state_dict(keep_vars=True), directory, self._layout)
        self._filled = folder

    def _own_share(
        self, data: Sequence[CheckedDatum], loss: Loss, scorer: AnswerScorer, factor: int
    ) -> tuple[float, dict[int, NDArray[np.float32]]]:
        """The sum of the losses of this rank's rows, and the logprobs of their datums by their places. factor: of the
        loss in the backward pass; 0: there is none.
        """
        ranks, total = self.ranks, 0.0
        logprobs: dict[int, NDArray[np.float32]] = {}
        most, packed = self._config.micro_batch_tokens, scorer.packed
        rows = rows_of(data, most, ranks.size, packed=packed)
        # All ranks run their first row together, then their second one, and so on.
        while len(rows) % ranks.size:
            rows.append([])
        for places in rows[ranks.rank :: ranks.size]:
            row = [data[place] for place in places]
            losses, found_n = self._compute(row or [data[0].empty], loss, scorer, factor)
            total += losses
            ends = np.cumsum([each.targets.size for each in row])[:-1]
            for place, own in zip(places, np.split(found_n, ends), strict=bool(row)):
                logprobs[place] = own.reshape(data[place].targets.shape)
        return total, logprobs

    def _score(self, arguments: Mapping[str, Any], body: bytes) -> Callable[[], OperationResult]:
        """What a client asks of a prompt, under saved weights (folder "": the base model)."""
        call = read_prompt_call(body)
        check_tokens("prompt", call.tokens_t, self._vocabulary)
        reader = PromptReader(call, self._device)
        slot = self._snapshot_slot(arguments["folder"]) if len(reader.rows_n) else None

        def read() -> OperationResult:
            if len(reader.rows_n):
                row = CheckedDatum(call.tokens_t[:-1], call.tokens_t[1:], {})
                micro = laid_out([row], packed=self._scorer.packed)
                places_n = micro.places_n[reader.rows_n]
                parts = micro.tokens_bt, places_n, micro.positions_bt, micro.pieces
                with self._using(slot) as scorer:
                    scorer.read_logits(*parts, reader.read)
            return write_prompt_scores(call, reader.scores)

        return read

    def _score_sample(
        self, arguments: Mapping[str, Any], body: bytes
    ) -> Callable[[], OperationResult]:
        """The drawn sequences of the body, with the most likely tokens at each of their positions."""
        drawn, prompt = read_sample_result(body), arguments["prompt"]
        behind = [np.frombuffer(prompt + each.tokens, "<i4").astype(np.int64) for each in drawn]
        for tokens_t in behind:
            check_tokens("sample", tokens_t, self._vocabulary)
        slot = self._snapshot_slot(arguments["folder"])
        how = arguments["top_tokens"], arguments["temperature"], self._config.micro_batch_tokens

        def read() -> OperationResult:
            with self._using(slot) as scorer:
                return write_sample_result(with_top_tokens(scorer, drawn, behind, *how))

        return read

    def _snapshot_slot(self, folder: str) -> Slot | None:
        """The slot of saved weights, of which the last few stay in memory; None: the base model, or full weights,
        which the frozen model has then.
        """
        slot = self._scored.pop(folder, None)
        if folder and slot is None:
            directory = self._directory({"folder": folder})
            if not self._factory.shape_of(directory).rank:
                check_version(directory)
                self._fill(folder)
                return None
            slot = self._factory.load(directory, optimizer=False)
        self._fill("")
        if slot is None:
            return None
        self._scored[folder] = slot
        while len(self._scored) > SCORED_SLOTS_MAX:
            del self._scored[next(iter(self._scored))]
        return slot

    def _check(self, place: int, datum: Datum, loss: Loss, *, learns: bool) -> CheckedDatum:
        """WrongCall: the datum cannot be computed."""
        try:
            return self._checked(datum, loss, learns=learns)
        except WrongCall as wrong:
            raise WrongCall(f"datum {place}: {wrong}") from wrong

    def _checked(self, datum: Datum, loss: Loss, *, learns: bool) -> CheckedDatum:
        tokens, inputs = len(datum.tokens_t), datum.inputs
        if not 0 < tokens <= self._tokens_max:
            raise WrongCall(f"model_input: expected 1 to {self._tokens_max} tokens; found {tokens}")
        check_tokens("model_input", datum.tokens_t, self._vocabulary)
        targets = targets_of(inputs, tokens, self._vocabulary)
        if targets.size > TARGETS_MAX:
            raise WrongCall(f"{TARGETS}: expected at most {TARGETS_MAX}; found {targets.size}")
        if not learns:
            # The client asks for logprobs, and computes a loss of its own from them.
            ones = np.ones(targets.shape, dtype=np.float32)
            inputs = {"weights": ones, **inputs}
        return CheckedDatum(datum.tokens_t, targets, given_of(loss, inputs, targets.shape))

    def _compute(
        self, row: Sequence[CheckedDatum], loss: Loss, scorer: AnswerScorer, factor: int
    ) -> tuple[float, NDArray[np.float32]]:
        """The sum of the losses of one micro-batch, and its logprobs [n]. factor: as in `_own_share`."""
        micro = laid_out(row, packed=scorer.packed)
        targets_n = np.concatenate([each.targets.reshape(-1) for each in row])
        logprobs_n = scorer.score_targets(
            micro.tokens_bt, micro.places_n, targets_n, micro.positions_bt, micro.pieces
        ).logprobs_n
        given = {
            name: torch.from_numpy(np.concatenate([each.given[name] for each in row]))
            for name in row[0].given
        }
        datums_n = np.repeat(np.arange(len(row)), [each.targets.size for each in row])
        targets = Targets(
            logprobs_n,
            {name: each.to(self._device) for name, each in given.items()},
            torch.from_numpy(datums_n).to(self._device),
        )
        losses_n = loss.of_targets(targets)
        if factor:
            torch.autograd.backward(losses_n.sum() * factor)
        return float(losses_n.detach().double().sum()), logprobs_n.detach().cpu().numpy()


def _memory_beside(model: Any, ranks: Ranks) -> float:
    """The bytes of a rank's GPU, or of its part of the machine, that the model leaves: the least of all ranks."""
    if ranks.device.type == "cuda":
        free = torch.cuda.mem_get_info(ranks.device)[0]
    else:
        own = (own_shard(each) for each in model.parameters())
        base = sum(each.numel() * each.element_size() for each in own)
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = machine // ranks.on_first_host - base
    lacks = torch.tensor(-free, dtype=torch.float64, device=ranks.device)
    return -float(ranks.maxima(lacks))


def _failing(
    detail: str, category: Literal["user", "server"] = "server"
) -> Callable[[], OperationResult]:
    """The rest of a call that cannot be run."""
    return lambda: OperationFailed(detail, category)


def _since(began_at: float) -> str:
    return f"{time.monotonic() - began_at:.1f}"
