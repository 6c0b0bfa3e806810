"""The policy under training: float32 master weights, AdamW, and the optimizer steps of a train
step.

Suffixes of names: n = answer tokens of a micro-batch, in row-major order.
"""

import logging
import math
import random
import resource
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

from echo2d.core.protocol.experts import ExpertShape
from echo2d.learner.batch.packing import MicroBatch, PackedAnswer, micro_batches
from echo2d.learner.config import LearnerConfig
from echo2d.learner.metrics.report import Effort, RouterLoad, StepReport
from echo2d.learner.metrics.staleness import (
    NO_TOKENS,
    Tally,
    add_up,
    by_staleness,
    empty_tally,
    over_ranks,
    overall,
    tally,
)
from echo2d.learner.model import lora
from echo2d.learner.model.begun_step import BegunStep, Leaves, StepLeftError, finishes
from echo2d.learner.model.flops import ModelSize, peak_of
from echo2d.learner.model.layers import compile_layers, prepare_layers
from echo2d.learner.model.load import empty_model, fill, naming
from echo2d.learner.model.logprobs import TokenScores
from echo2d.learner.model.moments import adamw
from echo2d.learner.model.router import LayerSums, Routers, router_load
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.model.trajectory_scores import ScoreSums, no_sums, score_sums, scores_of
from echo2d.learner.objective.hooks import loss_of
from echo2d.learner.objective.objectives import (
    LossTotals,
    distance_to_base,
    means_of_answers,
    policy_loss,
    surrogate_loss,
    teacher_baseline,
    teacher_lead,
    token_shares,
)
from echo2d.learner.objective.token_weights import WeightInputs, weigh
from echo2d.learner.ranks.ranks import Ranks, whole
from echo2d.learner.saving.layout import Layout, layout_of

log = logging.getLogger("echo2d.learner")


class PoisonedGroupsError(ArithmeticError):
    """The gradients of these groups are not finite; nothing was changed."""

    def __init__(self, line: str, groups: Sequence[int]) -> None:
        super().__init__(line, groups)  # the arguments with which it is unpickled on other ranks
        self.line, self.groups = line, groups

    def __str__(self) -> str:
        return self.line


@dataclass(frozen=True, slots=True)
class Part:
    """The data of one optimizer step."""

    answers: Sequence[PackedAnswer]  # of all ranks
    totals: LossTotals  # over all ranks
    micro: Sequence[MicroBatch]  # of this rank


_Accumulated = tuple[Tally, ScoreSums, list[LayerSums]]


@dataclass(slots=True)
class _Applied:
    """The optimizer steps of a train step that this process has applied, or skipped as poison."""

    parts: list[Part]
    # These two lack the optimizer steps that were skipped. done has an entry for each micro-batch.
    done: list[_Accumulated]
    norms: list[float]
    before: BegunStep | None  # the optimizer steps that another process had applied
    poisoned: int = 0

    @property
    def count(self) -> int:
        return len(self.parts) + (self.before.parts if self.before else 0)

    @property
    def micro(self) -> int:
        """How many micro-batches this process's optimizer steps have on this rank."""
        return sum(len(part.micro) for part in self.parts)


class Policy:
    """Model and optimizer. `state` and `progress` are what a checkpoint saves, `restore` takes
    both.
    """

    def __init__(self, config: LearnerConfig, ranks: Ranks) -> None:
        seed_generators(config.rng_seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        if ranks.device.type == "cuda":
            # Products of float32 factors use TF32: 10 bits of mantissa, but float32's range and sums.
            torch.set_float32_matmul_precision("high")
        self._config = config
        self._ranks = ranks
        self._row_ranks = ranks.row_ranks(config.context_parallel)
        model = empty_model(config.model)
        self.layout = layout_of(model, config.model)
        if config.lora_rank:
            lora.attach(model, config)
        prepare_layers(model, config, ranks.device)
        self._size = ModelSize.of(model)
        self.model = self._filled(model, config.model, self.layout).train()
        if config.lora_rank:
            lora.initialize(self.model)
        self._loss = loss_of(config)
        self._scorer = self._scorer_of(self.model)
        if config.compile:
            # The scorer has run the layers before this on a few tokens, for which compiling does not pay.
            compile_layers(self.model, config, ranks.device)
        # Compiled layers get no hooks, because a hook would cut the compiled code into pieces.
        self._routers = Routers(self.model, ranks.device, hooked=not config.compile)
        self._base = self._frozen(config.model) if config.kl_coef else None
        with naming("teacher"):
            self._teacher = self._frozen(config.teacher) if config.teacher else None
        self._kept = StateDictOptions(
            ignore_frozen_params=bool(config.lora_rank), strict=not config.lora_rank
        )
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._optimizer, self._moments = adamw(trained, config, on_gpu=ranks.device.type == "cuda")
        # All ranks have built the same model. From here on each has its own dropout. The seeds of two ranks
        # are 1,000,003 apart, because runs use seeds closer together.
        seed_generators(config.rng_seed + ranks.rank * 1_000_003)

    def _filled(self, model: Any, directory: Path, layout: Layout) -> Any:
        """The model with this rank's shards of its weights, from the files."""
        return fill(self._ranks.shard(model, self._config), directory, layout, self._ranks.device)

    def _scorer_of(self, model: Any) -> AnswerScorer:
        return AnswerScorer(model, packing=self._config.packing, row_ranks=self._row_ranks)

    def _frozen(self, directory: Path) -> AnswerScorer:
        """Another model, which is not trained and scores the same tokens: the base or the teacher."""
        model = empty_model(directory).requires_grad_(requires_grad=False)
        layout = layout_of(model, directory)
        return self._scorer_of(self._filled(model, directory, layout).eval())

    @property
    def _scorers(self) -> list[AnswerScorer]:
        every = (self._scorer, self._base, self._teacher)
        return [scorer for scorer in every if scorer is not None]

    @property
    def vocab_size(self) -> int:
        """How many token ids the policy can read. Its head may have more rows than the tokenizer has tokens."""
        return _token_ids(self._scorer)

    @property
    def expert_shape(self) -> ExpertShape | None:
        """What the experts of a token may be; None: a dense model."""
        return self._routers.shape

    def lay_out(self, parts: Sequence[Sequence[PackedAnswer]]) -> list[Part]:
        """Pack the answers of each optimizer step into micro-batches."""
        return [Part(part, _totals(part), self._micro_batches(part)) for part in parts]

    def _micro_batches(self, answers: Sequence[PackedAnswer]) -> list[MicroBatch]:
        count = self._row_ranks.size
        return micro_batches(
            answers,
            self._config.micro_batch_tokens * count,
            packed=all(each.packed for each in self._scorers),
            rank=self._ranks.rank // count,
            ranks=self._ranks.size // count,
            pair_cost=self._size.pair_cost,
            multiple=count,
        )

    def train_step(
        self,
        step: int,
        parts: Sequence[Part],
        staleness_max: int,
        *,
        begun: BegunStep | None = None,
        leaves: Leaves = finishes,
    ) -> StepReport:
        """Run train step `step`: one optimizer step on each of the parts that `lay_out` returned. Without
        parts, because all answers were filtered, nothing changes. begun: the optimizer steps of this
        step that were applied before.

        A gradient that is not finite is never applied. If some groups cause it, the first optimizer step raises
        PoisonedGroupsError, and a later one is skipped. FloatingPointError: no group alone causes it, or every group
        does. StepLeftError: `leaves` returned True; the gradient is dropped, and the random number generators are set
        back to their states before it.
        """
        if not parts:
            return StepReport(0.0, 0.0, NO_TOKENS, {}, (), Effort(self._lr(step), 0.0, None, 0.0))
        lr = self._lr(step)
        for group in self._optimizer.param_groups:
            # The optimizer with moments of 8 bits wants a tensor.
            group["lr"] = torch.tensor(lr) if isinstance(group["lr"], Tensor) else lr
        applied = _Applied([], [], [], begun)
        rng = generator_states()
        total = sum(len(part.micro) for part in parts)

        def leaves_after(done: int) -> bool:
            return leaves(applied.micro + done, total, applied.count)

        try:
            proximal = self._proximal(parts, leaves_after)
            for part in parts:
                accumulated = self._gradient(part, staleness_max, proximal, leaves_after)
                norm = self._optimize()
                if norm is None:
                    poison = self._poison(step, part, staleness_max, leaves_after)
                    if not applied.count:
                        raise poison
                    # Earlier optimizer steps are applied, so the batch cannot come again.
                    log.warning(
                        "skipped step=%d part=%d poisoned=%s", step, applied.count, poison.groups
                    )
                    applied.poisoned += len(poison.groups)
                else:
                    applied.done += accumulated
                    applied.norms.append(norm)
                applied.parts.append(part)
                rng = generator_states()
        except StepLeftError:
            self._optimizer.zero_grad()
            restore_generators(rng)
            raise StepLeftError(self._begun(applied, staleness_max)) from None
        whole_step = self._begun(applied, staleness_max)
        assert whole_step is not None
        router = router_load([layers for *_, layers in applied.done], self._ranks)
        effort = Effort(self._lr(step), whole_step.operations, self._peak(), _memory_gib())
        return _report(whole_step, effort, router)

    def _begun(self, applied: "_Applied", staleness_max: int) -> BegunStep | None:
        """The optimizer steps that are applied, over all ranks. All ranks call this together. None: there are none."""
        before, device = applied.before, self._ranks.device
        if not applied.parts:
            return before
        # A trajectory is in one micro-batch. The first of the ranks that share its row reports it.
        done = [] if self._row_ranks.rank else applied.done
        scored = scores_of([no_sums(device), *(sums for _, sums, _ in done)])
        scores = tuple(chain.from_iterable(self._ranks.gather(scored)))
        tallies = [empty_tally(staleness_max + 1, device), *(each for each, *_ in done)]
        tallies += [before.tally_of(staleness_max, self._ranks)] if before else []
        operations = sum(self._size.operations(part.micro) for part in applied.parts)
        operations /= self._row_ranks.size
        groups = {answer.group_id for part in applied.parts for answer in part.answers}
        return BegunStep(
            applied.count,
            frozenset(groups) | (before.groups if before else frozenset()),
            max([*applied.norms, *([before.norm] if before else [])]),
            applied.poisoned + (before.poisoned if before else 0),
            self._ranks.total(operations) + (before.operations if before else 0.0),
            over_ranks(add_up(tallies), self._ranks),
            scores + (before.scores if before else ()),
        )

    def _peak(self) -> float | None:
        """Operations per second that the devices of all ranks could do together; None: not known."""
        device = self._ranks.device
        each = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return each * self._ranks.size if each else None

    def _lr(self, step: int) -> float:
        config = self._config
        return config.lr * lr_share(
            step,
            steps=config.steps,
            warmup_steps=config.warmup_steps,
            schedule=config.lr_schedule,
            last_share=config.lr_last_share,
        )

    def _gradient(
        self,
        part: Part,
        staleness_max: int,
        proximal: dict[int, Tensor],
        leaves_after: Callable[[int], bool] = lambda _: False,
    ) -> list[_Accumulated]:
        """Compute the gradient of one optimizer step. Returns the sums of each micro-batch for the report.

        StepLeftError: `leaves_after`, called with the number of micro-batches done, returned True.
        """
        found: list[_Accumulated] = []
        teacher, baseline = self._taught(part, leaves_after)
        for each, teacher_n in zip(part.micro, teacher, strict=True):
            # The GPU is at most one micro-batch behind, because the copy of the next one to the GPU waits for it.
            if leaves_after(len(found)):
                raise StepLeftError(None)
            if isinstance(self.model, FSDPModule):
                last, when = each is part.micro[-1], self._config.gradient_sync
                self.model.set_requires_gradient_sync(last or when != "last")
                self.model.set_requires_all_reduce(last or when != "host")
            proximal_n, totals = proximal.get(id(each)), part.totals
            found.append(
                self._accumulate(each, totals, staleness_max, proximal_n, teacher_n, baseline)
            )
        return found

    def _taught(
        self, part: Part, leaves_after: Callable[[int], bool]
    ) -> tuple[list[Tensor | None], float]:
        """The teacher's logprobs [n] of each micro-batch, and the baseline of `teacher_lead`. All ranks call this."""
        if self._teacher is None:
            return [None] * len(part.micro), 0.0
        found: list[Tensor | None] = []
        means: list[float] = []
        for each in part.micro:
            if leaves_after(0):
                raise StepLeftError(None)
            # Heads of one tokenizer may have different numbers of rows for no token. Only a made-up answer has such a
            # token, and it must not end the run.
            known_bt = np.minimum(each.tokens_bt, _token_ids(self._teacher) - 1)
            logprobs_n = _logprobs(self._teacher, replace(each, tokens_bt=known_bt))
            assert logprobs_n is not None
            found.append(logprobs_n)
            if each.tokens:
                lead_n = teacher_lead(self._here(each.rollout_logprobs_n), logprobs_n)
                means += means_of_answers(lead_n, self._here(each.answers_n)).tolist()
        # The ranks that share rows have the same answers.
        gathered = self._ranks.gather([] if self._row_ranks.rank else means)
        return found, self._ranks.share(lambda: teacher_baseline([*chain.from_iterable(gathered)]))

    def _optimize(self) -> float | None:
        """Apply the clipped gradient and return its norm before clipping; None: it is not finite and was dropped."""
        norm = float(
            whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.grad_clip))
        )
        # Written so that NaN fails too.
        finite = norm < float("inf")
        if finite:
            (self._moments or self._optimizer).step()
        self._optimizer.zero_grad()
        return norm if finite else None

    def _poison(
        self, step: int, part: Part, staleness_max: int, leaves_after: Callable[[int], bool]
    ) -> PoisonedGroupsError:
        """The groups whose gradients alone are not finite. All ranks compute the gradient of each group together.

        FloatingPointError: no group has such a gradient, or every group has.
        """
        groups: dict[int, list[PackedAnswer]] = {}
        for answer in part.answers:
            groups.setdefault(answer.group_id, []).append(answer)
        found = []
        for name, answers in groups.items():
            (alone,) = self.lay_out([answers])
            self._gradient(
                replace(alone, totals=part.totals), staleness_max, {}, lambda _: leaves_after(0)
            )
            norm = whole(torch.nn.utils.get_total_norm(_gradients(self.model)))
            self._optimizer.zero_grad()
            if not float(norm) < float("inf"):
                found.append(name)
        if not 0 < len(found) < max(2, len(groups)):
            raise FloatingPointError(_no_number(step))
        return PoisonedGroupsError(_no_number(step), found)

    def _proximal(
        self, parts: Sequence[Part], leaves_after: Callable[[int], bool]
    ) -> dict[int, Tensor]:
        """The logprobs under the weights at the start of this train step, by `id` of the
        micro-batch.

        The first optimizer step starts from these weights, so it uses its own logprobs.
        """
        if self._config.proximal != "recomputed":
            return {}
        found = {}
        with torch.no_grad():
            for each in chain.from_iterable(part.micro for part in parts[1:]):
                if leaves_after(0):
                    raise StepLeftError(None)
                found[id(each)] = self._scores(each).logprobs_n
        return found

    @torch.no_grad()
    def mean_loss(self, answers: Sequence[PackedAnswer], leaves: Leaves = finishes) -> float:
        """The mean of -log p over the answers' tokens, in nats. All ranks call this together. StepLeftError: `leaves`
        returned True.
        """
        micro, total = self._micro_batches(answers), 0.0
        self.model.eval()
        try:
            for each in micro:
                if leaves(0, len(micro), 0):
                    raise StepLeftError(None)
                total -= float(self._scores(each).logprobs_n.double().sum())
        finally:
            self.model.train()
        # The ranks that share a row have all its scores.
        return self._ranks.total(total / self._row_ranks.size) / _totals(answers).tokens

    def penalties(
        self, answers: Sequence[PackedAnswer], leaves: Leaves = finishes
    ) -> dict[tuple[int, int], float]:
        """kl_coef times the KL to the base, summed over the tokens of each answer, by group and number there; under the
        present weights, without dropout. All ranks call this together, and get all answers. StepLeftError: `leaves`
        returned True. PoisonedGroupsError: the KL of some groups is not finite. FloatingPointError: that of all.
        """
        config, micro = self._config, self._micro_batches(answers)
        found: dict[tuple[int, int], float] = {}
        self.model.eval()
        try:
            for each in micro:
                if leaves(0, len(micro), 0):
                    raise StepLeftError(None)
                own_n, base_n = _logprobs(self._scores, each), _logprobs(self._base, each)
                assert own_n is not None
                assert base_n is not None
                distance_n = distance_to_base(own_n, base_n, estimator=config.kl_estimator)
                sums = torch.zeros(each.answers, dtype=torch.float64, device=base_n.device)
                sums.index_add_(0, self._here(each.answers_n), distance_n.double())
                scaled = (config.kl_coef * sums).tolist()
                found |= dict(zip(each.trajectories, scaled, strict=True))
        finally:
            self.model.train()
        # The ranks that share rows have the same answers.
        gathered = self._ranks.gather({} if self._row_ranks.rank else found)
        every = self._ranks.share(lambda: dict(chain.from_iterable(map(dict.items, gathered))))
        if bad := {group for (group, _), value in every.items() if not math.isfinite(value)}:
            line = "the KL to the base is not finite"
            if len(bad) >= max(2, len({group for group, _ in every})):
                raise FloatingPointError(line)
            # Advantages over the whole batch would carry it to all groups.
            raise PoisonedGroupsError(line, sorted(bad))
        return every

    def weights(self) -> dict[str, Tensor]:
        """The weights that are trained and published, by name."""
        return lora.trained(self.model)

    def state(self) -> dict[str, Any]:
        """The trained weights and the optimizer's state, not copied. To resume, a checkpoint fills the result,
        which is then given to `restore`.
        """
        with nullcontext() if self._moments is None else self._moments.on_host():
            model, optimizer = get_state_dict(self.model, self._optimizer, options=self._kept)
            # These are the optimizer's own dicts, in which `on_host` puts the moments back.
            states: dict[str, Any] = cast("Any", optimizer["state"])
            own = {name: dict(state) for name, state in states.items()}
            groups: list[dict[str, Any]] = cast("Any", optimizer["param_groups"])
            # AdamW's settings are left out, because another kind of AdamW has others.
            names = [group["params"] for group in groups]
        # Tied weights have two names, of which torch treats only one as frozen.
        trained = self.weights()
        return {
            "model": {name: model[name] for name in trained},
            "optimizer": {"state": own, "names": names},
        }

    def progress(self) -> dict[str, Any]:
        """The states of this rank's random number generators."""
        return {"rng": generator_states()}

    def restore(self, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """Bring back a checkpoint. The optimizer's settings are those of the config, not of the
        checkpoint.
        """
        saved: dict[str, Any] = state["optimizer"]
        groups = [
            {**ours, "params": names}
            for ours, names in zip(self._optimizer.param_groups, saved["names"], strict=True)
        ]
        set_state_dict(
            self.model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict={"state": saved["state"], "param_groups": groups},
            options=self._kept,
        )
        if self._moments is not None:
            self._moments.take()
        if "rng" in progress:
            restore_generators(progress["rng"])

    def _scores(self, micro: MicroBatch) -> TokenScores:
        """The policy's scores [n] of the answer tokens, with the experts that the engines chose."""
        self._routers.replaying(micro, self._row_ranks)
        return self._scorer(micro)

    def _accumulate(
        self,
        micro: MicroBatch,
        totals: LossTotals,
        staleness_max: int,
        proximal_n: Tensor | None,
        teacher_n: Tensor | None,
        baseline: float,
    ) -> _Accumulated:
        """Run one micro-batch forward and backward; its gradient is added to that of the optimizer
        step.
        """
        config = self._config
        with self._routers.counting(micro, self._row_ranks) as layers:
            scores = self._scores(micro)
        logprobs_n = scores.logprobs_n
        base_n = None if config.penalizes else _logprobs(self._base, micro)
        if not micro.tokens:
            # Other ranks have answers in this micro-batch, and with FSDP2 every rank must run forward and backward.
            torch.autograd.backward(logprobs_n.sum())
            device = self._ranks.device
            return empty_tally(staleness_max + 1, device), no_sums(device), layers
        advantages_n, lead_n = self._here(micro.advantages_n), None
        if teacher_n is not None:
            lead_n = teacher_lead(logprobs_n, teacher_n)
            advantages_n = advantages_n + config.teacher_coef * (lead_n - baseline)
        inputs = WeightInputs(
            logprobs_n,
            self._here(micro.rollout_logprobs_n),
            advantages_n,
            self._here(micro.staleness_n),
            self._here(micro.answers_n),
            proximal_n,
            scores.entropy_n,
        )
        found = weigh(config, inputs)
        episode_tokens_n = self._here(micro.episode_tokens_n)
        shares_n = token_shares(config.mean, totals, episode_tokens_n, constant=config.loss_tokens)
        if self._loss is None:
            loss = policy_loss(logprobs_n, found.weights_n, inputs.advantages_n, shares_n)
            shown = surrogate_loss(found.surrogate_n, inputs.advantages_n, shares_n)
        else:
            loss = (shares_n * self._loss(inputs)).sum()
            shown = loss.detach()
        distance_n = self._distance(inputs, base_n)
        extra = self._regularizer(inputs, distance_n, shares_n)
        loss, shown = loss + extra, shown + extra.detach()
        # FSDP2 averages gradients over the ranks; the factor turns the mean into the sum.
        torch.autograd.backward(loss * self._ranks.size)
        tallied = tally(
            shown,
            scores.entropy_n,
            found.log_ratio_n,
            found.keeps_n,
            found.corrected_n,
            inputs.staleness_n,
            staleness_max + 1,
            distance_n,
            lead_n,
        )
        return tallied, score_sums(micro, scores), layers

    def _distance(self, inputs: WeightInputs, base_n: Tensor | None) -> Tensor | None:
        """The KL term of each token, with gradient; None: the loss has no such term."""
        if base_n is None:
            return None
        config = self._config
        drawn_n = inputs.rollout_logprobs_n if config.kl_weighted else None
        return distance_to_base(inputs.logprobs_n, base_n, drawn_n, config.kl_estimator)

    def _regularizer(
        self, inputs: WeightInputs, distance_n: Tensor | None, shares_n: Tensor
    ) -> Tensor:
        """kl_coef * KL to the base - entropy_coef * entropy, with gradient."""
        config, found = self._config, torch.zeros((), device=shares_n.device)
        if distance_n is not None:
            found = found + config.kl_coef * (shares_n * distance_n).sum()
        if config.entropy_coef and inputs.entropy_n is not None:
            found = found - config.entropy_coef * (shares_n * inputs.entropy_n).sum()
        return found

    def _here(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._ranks.device)


def _logprobs(
    scorer: Callable[[MicroBatch], TokenScores] | None, micro: MicroBatch
) -> Tensor | None:
    """log p [n] without gradient; None: there is no such model."""
    if scorer is None:
        return None
    with torch.no_grad():
        return scorer(micro).logprobs_n


def _token_ids(scorer: AnswerScorer) -> int:
    return int(scorer.model.config.get_text_config().vocab_size)


def _memory_gib() -> float:
    """The peak of memory since the start: of the GPU, or of the process if there is no GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _no_number(step: int) -> str:
    return f"the gradient of train step {step} is not finite"


def _gradients(model: Any) -> list[Tensor]:
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def _report(step: BegunStep, effort: Effort, router: RouterLoad | None) -> StepReport:
    """The report of a completed step. Its loss is the mean over its optimizer steps."""
    return StepReport(
        float(step.tally.loss) / step.parts,
        step.norm,
        overall(step.tally),
        by_staleness(step.tally),
        step.scores,
        effort,
        step.poisoned,
        router,
    )


def _totals(answers: Sequence[PackedAnswer]) -> LossTotals:
    tokens = sum(len(each.logprobs_n) for each in answers)
    return LossTotals(tokens, sum(each.first for each in answers))


# --- the learning rate of each train step: a linear warm-up, then constant, or down to a share by the last step

LrSchedule = Literal["constant", "linear", "cosine"]


def lr_share(
    step: int, *, steps: int, warmup_steps: int, schedule: LrSchedule, last_share: float
) -> float:
    """The share of the configured learning rate for train step `step`, which counts from 1.

    The decay begins after the warm-up, and reaches last_share at step `steps`. cosine: half a period
    (SGDR, arXiv 1608.03983).
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    left = 1.0 - done if schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return last_share + (1.0 - last_share) * left


# --- the random number generators of a learner process


def seed_generators(rng_seed: int) -> None:
    """Seed Python, numpy and torch, CUDA included."""
    random.seed(rng_seed)
    np.random.seed(rng_seed % (1 << 32))
    torch.manual_seed(rng_seed)


def generator_states() -> dict[str, Any]:
    """Return the states as values and tensors that `torch.load(weights_only=True)` accepts."""
    facts = np.random.get_state(legacy=False)
    # torch has no uint32 arithmetic, and a checkpoint holds no numpy arrays.
    key = torch.from_numpy(facts["state"]["key"].astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": {**facts, "state": {**facts["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_generators(kept: dict[str, Any]) -> None:
    """Restore what `generator_states` returned. With another number of GPUs, their generators stay as they
    are.
    """
    random.setstate(kept["python"])
    facts = kept["numpy"]
    key = facts["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**facts, "state": {**facts["state"], "key": key}})
    torch.set_rng_state(kept["torch"])
    if torch.cuda.is_available() and len(kept["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(kept["cuda"])
