"""The policy under training: float32 master weights, AdamW, and the optimizer steps of a train
step.

Suffixes of names: b = rows, t = positions, v = vocabulary, n = answer tokens of a micro-batch, in
row-major order.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from echo2d.client import OperatorFault, TrajectoryScore
from learner.batch.packing import MicroBatch, PackedAnswer, SharedPrompts, micro_batches
from learner.config import LearnerConfig
from learner.metrics.staleness import (
    NO_TOKENS,
    Means,
    Tally,
    add_up,
    by_staleness,
    empty_tally,
    over_ranks,
    overall,
    tally,
)
from learner.metrics.trajectory_scores import ScoreSums, no_sums, score_sums, scores_of
from learner.model import lora, rng_state
from learner.objective.objectives import LossTotals, distance_to_base, policy_loss, token_shares
from learner.objective.token_weights import WeightInputs, weigh
from learner.ranks.ranks import Ranks

CONFIGURED = ("lr", "betas", "weight_decay")  # optimizer settings that the config decides
RANK_SEED_STEP = 1_000_003  # between the seeds of two ranks; runs use seeds closer together

log = logging.getLogger("echo2d.learner")


@dataclass(frozen=True, slots=True)
class StepReport:
    """Loss, largest gradient norm of the optimizer steps, and means over all tokens and by
    staleness.

    scores: of the trajectories of all ranks, on rank 0; nothing elsewhere.
    """

    loss: float
    grad_norm: float
    means: Means
    staleness: dict[int, Means]
    scores: tuple[TrajectoryScore, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The data of one optimizer step: its totals over all ranks, and the micro-batches of this
    rank.
    """

    totals: LossTotals
    micro: Sequence[MicroBatch]


class Policy:
    """Model and optimizer. `state` and `progress` are what a checkpoint saves, `restore` takes
    both.
    """

    def __init__(self, config: LearnerConfig, ranks: Ranks) -> None:
        rng_state.seed(config.rng_seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        self._config = config
        self._ranks = ranks
        model = load_model(config.model)
        if config.lora_rank:
            lora.attach(model, config)
        if config.gradient_checkpointing:
            _checkpoint_layers(model, config.model)
        self.model = ranks.place(model).train()
        self._packed = config.packing and keeps_answers_apart(self.model)
        self._shared = self._packed and shares_prompts(self.model)
        if config.packing and not self._packed:
            log.warning("packing is off: this model lets answers in the same row see each other")
        self._base = ranks.place(_base_model(config)) if config.kl_coef else None
        self._kept = StateDictOptions(
            ignore_frozen_params=bool(config.lora_rank), strict=not config.lora_rank
        )
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        # Workers cannot foresee which of their tokens are scored, so it has no seed.
        self._unforeseen = np.random.default_rng()
        # All ranks have built the same model. From here on each has its own dropout.
        rng_state.seed(config.rng_seed + ranks.rank * RANK_SEED_STEP)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def lay_out(self, parts: Sequence[Sequence[PackedAnswer]]) -> list[Part]:
        """Pack the answers of each optimizer step into micro-batches."""
        return [Part(_totals(part), self._micro_batches(part)) for part in parts]

    def _micro_batches(self, answers: Sequence[PackedAnswer]) -> list[MicroBatch]:
        tokens_max, ranks = self._config.micro_batch_tokens, self._ranks
        return micro_batches(
            answers,
            tokens_max,
            packed=self._packed,
            shared=self._shared,
            rank=ranks.rank,
            ranks=ranks.size,
        )

    def train_step(self, step: int, parts: Sequence[Part], staleness_max: int) -> StepReport:
        """Run train step `step`: one optimizer step on each of the parts that `lay_out` returned. With
        none, because all answers were filtered, nothing changes.

        FloatingPointError: a gradient is not finite. The optimizer steps before it stay applied.
        """
        if not parts:
            return StepReport(0.0, 0.0, NO_TOKENS, {}, ())
        config = self._config
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(1, config.warmup_steps))
        proximal = self._proximal(parts)
        tallies: list[Tally] = []
        scored: list[ScoreSums] = []
        norms = []
        for part in parts:
            for each in part.micro:
                tallied, sums = self._accumulate(
                    each, part.totals, staleness_max, proximal.get(id(each))
                )
                tallies.append(tallied)
                scored.append(sums)
            norms.append(self._optimize(step))
        # A trajectory is on one rank, in one micro-batch.
        scores = tuple(chain.from_iterable(self._ranks.gather(scores_of(scored))))
        return _report(over_ranks(add_up(tallies), self._ranks), max(norms), len(parts), scores)

    def _optimize(self, step: int) -> float:
        """Apply one optimizer step and return the norm of its gradient before clipping."""
        norm = float(
            _whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.grad_clip))
        )
        # Written so that NaN fails too.
        if not norm < float("inf"):
            self._optimizer.zero_grad()
            raise FloatingPointError(
                f"the gradient of train step {step} has norm {norm}; a restart gets the same batch"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def _proximal(self, parts: Sequence[Part]) -> dict[int, Tensor]:
        """The logprobs under the weights at the start of this train step, by `id` of the
        micro-batch.

        The first optimizer step starts from these weights, so its own logprobs serve.
        """
        if self._config.proximal != "recomputed":
            return {}
        with torch.no_grad():
            return {
                id(each): self._logprobs(self.model, each)
                for part in parts[1:]
                for each in part.micro
            }

    def weights(self) -> dict[str, Tensor]:
        """The weights that are trained and published, by name."""
        return lora.trained(self.model)

    def state(self) -> dict[str, Any]:
        """The trained weights and the optimizer's state, not copied. `restore` takes it after it
        has been filled.
        """
        model, optimizer = get_state_dict(self.model, self._optimizer, options=self._kept)
        # Tied weights have two names, of which torch treats only one as frozen.
        trained = self.weights()
        return {"model": {name: model[name] for name in trained}, "optimizer": optimizer}

    def progress(self) -> dict[str, Any]:
        """The states of this rank's random number generators."""
        return {"rng": rng_state.state()}

    def restore(self, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """Bring back a checkpoint. The optimizer's settings are those of the config, not of the
        checkpoint.
        """
        settings = [
            {name: group[name] for name in CONFIGURED} for group in self._optimizer.param_groups
        ]
        set_state_dict(
            self.model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self._kept,
        )
        for group, setting in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(setting)
        if "rng" in progress:
            rng_state.restore(progress["rng"])

    def _accumulate(
        self, micro: MicroBatch, totals: LossTotals, staleness_max: int, proximal_n: Tensor | None
    ) -> tuple[Tally, ScoreSums]:
        """Run one micro-batch forward and backward; its gradient is added to that of the optimizer
        step.
        """
        config = self._config
        logprobs_n, scored = self._scored_logprobs(micro)
        base_n = self._base_logprobs(micro)
        if not micro.tokens:
            # Other ranks have answers here, and FSDP2 needs every rank to run forward and backward.
            torch.autograd.backward(logprobs_n.sum())
            return empty_tally(staleness_max + 1, self._ranks.device), scored
        inputs = WeightInputs(
            logprobs_n,
            self._here(micro.rollout_logprobs_n),
            self._here(micro.advantages_n),
            self._here(micro.staleness_n),
            self._here(micro.answers_n),
            proximal_n,
        )
        found = weigh(config, inputs)
        shares_n = token_shares(config.mean, totals, inputs.answers_n, constant=config.loss_tokens)
        loss = policy_loss(logprobs_n, found.weights_n, inputs.advantages_n, shares_n)
        if base_n is not None:
            loss = loss + config.kl_coef * (shares_n * distance_to_base(logprobs_n, base_n)).sum()
        # FSDP2 averages gradients over the ranks; the factor turns the mean into the sum.
        torch.autograd.backward(loss * self._ranks.size)
        tallied = tally(
            loss,
            found.log_ratio_n,
            found.keeps_n,
            found.corrected_n,
            inputs.staleness_n,
            staleness_max + 1,
        )
        return tallied, scored

    def _base_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self._base is None:
            return None
        with torch.no_grad():
            return self._logprobs(self._base, micro)

    def _scored_logprobs(self, micro: MicroBatch) -> tuple[Tensor, ScoreSums]:
        """`_logprobs` of the model under training, and what they say about each trajectory.

        The distributions over the vocabulary are not kept: the backward pass frees them.
        """
        everything_nv, tokens_n = self._distributions(self.model, micro)
        logprobs_n = _at(everything_nv, tokens_n)
        if not micro.tokens:
            return logprobs_n, no_sums(self._ranks.device)
        return logprobs_n, score_sums(micro, everything_nv, logprobs_n, self._unforeseen)

    def _logprobs(self, model: Any, micro: MicroBatch) -> Tensor:
        return _at(*self._distributions(model, micro))

    def _distributions(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return answer_distributions(
            model,
            micro.tokens_bt,
            micro.answer_bt,
            micro.temperatures_n,
            micro.positions_bt,
            micro.shared,
        )

    def _here(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._ranks.device)


def _report(
    tallied: Tally, norm: float, optimizer_steps: int, scores: tuple[TrajectoryScore, ...]
) -> StepReport:
    """The report of a train step, whose loss is the mean over its optimizer steps."""
    return StepReport(
        float(tallied.loss) / optimizer_steps,
        norm,
        overall(tallied),
        by_staleness(tallied),
        scores,
    )


def _totals(answers: Sequence[PackedAnswer]) -> LossTotals:
    return LossTotals(sum(len(each.logprobs_n) for each in answers), len(answers))


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def answer_logprobs(
    model: Any,
    tokens_bt: NDArray[np.int64],
    answer_bt: NDArray[np.bool_],
    temperature: float | NDArray[np.float32],
    positions_bt: NDArray[np.int64] | None = None,
    shared: SharedPrompts | None = None,
) -> Tensor:
    """log p [n] of each answer token over the full vocabulary: float32, with gradient.

    temperature: at which the tokens were drawn, one for all or one for each [n].
    """
    return _at(
        *answer_distributions(model, tokens_bt, answer_bt, temperature, positions_bt, shared)
    )


def answer_distributions(
    model: Any,
    tokens_bt: NDArray[np.int64],
    answer_bt: NDArray[np.bool_],
    temperature: float | NDArray[np.float32],
    positions_bt: NDArray[np.int64] | None = None,
    shared: SharedPrompts | None = None,
) -> tuple[Tensor, Tensor]:
    """log p [n, v] of the whole vocabulary at each answer token: float32, with gradient; and the
    tokens [n]. temperature: as in `answer_logprobs`.

    An attention mask is passed only where answers share a prompt (checked by `shares_prompts`).
    Elsewhere rows are padded on the right, attention is causal, and where positions_bt restarts at
    0 the model does not look further back (checked by `keeps_answers_apart`).
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(tokens_bt).to(device)
    # The logits at t predict the token at t + 1.
    marked = torch.from_numpy(answer_bt).to(device)[:, 1:]
    context = _context(positions_bt, shared, device)
    logits_btv = model(input_ids=tokens, use_cache=False, **context).logits[:, :-1]
    heat = torch.as_tensor(temperature, dtype=torch.float32, device=device).reshape(-1, 1)
    logits_nv = logits_btv[marked].float() / heat
    return torch.log_softmax(logits_nv, dim=1), tokens[:, 1:][marked]


def _context(
    positions_bt: NDArray[np.int64] | None, shared: SharedPrompts | None, device: torch.device
) -> dict[str, Tensor]:
    """What tells the answers of a row apart, as keywords of the model."""
    context = {}
    if positions_bt is not None:
        context["position_ids"] = torch.from_numpy(positions_bt).to(device)
    if shared is not None:
        context["attention_mask"] = _seen(shared, device)
    return context


def _seen(shared: SharedPrompts, device: torch.device) -> Tensor:
    """Which token sees which [b, 1, t, t], as SDPA wants it."""
    piece_bt = torch.from_numpy(shared.piece_bt).to(device)
    prompt_bt = torch.from_numpy(shared.prompt_bt).to(device)
    before_tt = torch.ones(2 * [piece_bt.shape[1]], dtype=torch.bool, device=device).tril()
    own_btt = piece_bt[:, :, None] == piece_bt[:, None]
    prompt_btt = prompt_bt[:, :, None] == piece_bt[:, None]
    return ((own_btt | prompt_btt) & before_tt)[:, None]


def _at(everything_nv: Tensor, tokens_n: Tensor) -> Tensor:
    """log p [n] of these tokens."""
    return -torch.nn.functional.nll_loss(everything_nv, tokens_n, reduction="none")


ALONE = [3, 1, 2]  # tokens whose last logits must be the same wherever they stand


def keeps_answers_apart(model: Any) -> bool:
    """Whether an answer has the same logits with another answer before it in the row, told apart by
    positions.
    """
    return _ends_as_alone(model, [1, 2, 3, *ALONE], [0, 1, 2, 0, 1, 2], None)


def shares_prompts(model: Any) -> bool:
    """Whether an answer has the same logits behind another answer to the same copy of the prompt.

    Only with SDPA, and where a token sees all tokens before it: the mask would replace a window.
    """
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    if getattr(config, "_attn_implementation", "") != "sdpa" or set(kinds) != {"full_attention"}:
        return False
    if getattr(config, "sliding_window", None) is not None:
        return False
    # The prompt 3, 1, whose last token each answer has for itself, with the answers 1 and 2.
    shared = SharedPrompts(np.array([[0, 1, 1, 2, 2]]), np.zeros((1, 5), dtype=np.int64))
    return _ends_as_alone(model, [3, 1, 1, 1, 2], [0, 1, 2, 1, 2], shared)


def _ends_as_alone(
    model: Any, tokens: list[int], positions: list[int], shared: SharedPrompts | None
) -> bool:
    device = next(model.parameters()).device
    row, alone = torch.tensor([tokens], device=device), torch.tensor([ALONE], device=device)
    context = _context(np.array([positions]), shared, device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        here, there = (
            model(input_ids=ids, use_cache=False, **keywords).logits[0, -1]
            for ids, keywords in ((row, context), (alone, {}))
        )
    model.train(was_training)
    return bool(torch.allclose(here, there, rtol=1e-3, atol=1e-4))


def load_model(directory: Path) -> Any:
    """Load a causal language model in float32. OperatorFault: the directory lacks a file or a
    weight.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise OperatorFault(f"learner.model: {directory} has no {name}")
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise OperatorFault(
            f"learner.model: cannot load {directory}: {' '.join(str(error).split())}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise OperatorFault(
            f"learner.model: {directory} lacks the weights {', '.join(missing[:3])}"
        )
    return model


def _base_model(config: LearnerConfig) -> Any:
    """A frozen second model, for the KL distance to the base."""
    return load_model(config.model).requires_grad_(requires_grad=False).eval()


def _checkpoint_layers(model: Any, directory: Path) -> None:
    # The second name is that of older versions of transformers.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise OperatorFault(
            f"learner.gradient_checkpointing: the model in {directory} does not support it: {error}"
        ) from error
