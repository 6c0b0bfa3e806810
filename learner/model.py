"""The policy under training: float32 master weights, AdamW, and the optimizer steps of a train step.

Suffixes of names: b = rows, t = positions, v = vocabulary, n = answer tokens of a micro-batch, in row-major order.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from echo2d.client import OperatorFault
from learner import lora, rng_state
from learner.config import LearnerConfig
from learner.objectives import LossTotals, distance_to_base, policy_loss, token_shares
from learner.packing import Answer, MicroBatch, micro_batches
from learner.ranks import Ranks
from learner.staleness_metrics import (
    Means,
    Tally,
    add_up,
    by_staleness,
    nothing,
    over_ranks,
    overall,
    tally,
)
from learner.token_weights import Seen, weigh

CONFIGURED = ("lr", "betas", "weight_decay")  # of the optimizer
RANKS_APART = 1_000_003  # of the seeds of two ranks: far more than those of two runs

log = logging.getLogger("echo2d.learner")


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a train step saw: loss, largest norm of its optimizer steps' gradients, and the facts of `gauges`."""

    loss: float
    grad_norm: float
    means: Means
    staleness: dict[int, Means]


@dataclass(frozen=True, slots=True)
class Part:
    """What an optimizer step trains: its totals over all ranks, and the micro-batches of this rank."""

    totals: LossTotals
    micro: Sequence[MicroBatch]


class Policy:
    """Model and optimizer. Everything that a checkpoint must bring back is in `state` and `restore`."""

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
        if config.packing and not self._packed:
            log.warning("answers do not share rows: the model mixes those that do")
        self._base = ranks.place(_base_model(config)) if config.kl_coef else None
        self._kept = StateDictOptions(
            ignore_frozen_params=bool(config.lora_rank), strict=not config.lora_rank
        )
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(
            trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        rng_state.seed(config.rng_seed + ranks.rank * RANKS_APART)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def lay_out(self, parts: Sequence[Sequence[Answer]]) -> list[Part]:
        """One for each optimizer step."""
        return [Part(_totals(part), self._micro_batches(part)) for part in parts]

    def _micro_batches(self, answers: Sequence[Answer]) -> list[MicroBatch]:
        tokens_max, ranks = self._config.micro_batch_tokens, self._ranks
        return micro_batches(
            answers, tokens_max, packed=self._packed, rank=ranks.rank, ranks=ranks.size
        )

    def train_step(self, step: int, parts: Sequence[Part], staleness_max: int) -> StepReport:
        """Train step `step`: an optimizer step on each of what `lay_out` gave.

        FloatingPointError: a gradient is not finite. The weights are those of the last optimizer step before.
        """
        config = self._config
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(1, config.warmup_steps))
        proximal = self._proximal(parts)
        tallies, norms = [], []
        for part in parts:
            tallies += [
                self._accumulate(each, part.totals, staleness_max, proximal.get(id(each)))
                for each in part.micro
            ]
            norms.append(self._optimize(step))
        return _report(over_ranks(add_up(tallies), self._ranks), max(norms), len(parts))

    def _optimize(self, step: int) -> float:
        """One optimizer step; the norm of its gradient."""
        norm = float(
            _whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.grad_clip))
        )
        if not norm < float("inf"):
            self._optimizer.zero_grad()
            raise FloatingPointError(
                f"the gradient of train step {step} has norm {norm}; its batch stays the same"
            )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def _proximal(self, parts: Sequence[Part]) -> dict[int, Tensor]:
        """The logprobs with the weights that this train step starts from, by id of the micro-batch.

        The first optimizer step has them anyway.
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
        """What trains, and is published."""
        return lora.trained(self.model)

    def state(self) -> dict[str, Any]:
        """What trains, and its optimizer: tensors as they are. What fills it in place goes back by `restore`."""
        model, optimizer = get_state_dict(self.model, self._optimizer, options=self._kept)
        trained = (
            self.weights()
        )  # tied weights have two names, and only one of them counts as frozen
        return {"model": {name: model[name] for name in trained}, "optimizer": optimizer}

    def progress(self) -> dict[str, Any]:
        """What else must come back after a crash, to the same rank if there are as many then."""
        return {"rng": rng_state.state()}

    def restore(self, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """The optimizer's settings stay those of the config; a checkpoint has those that it was made with."""
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
    ) -> Tally:
        """Add the micro-batch's gradient to that of its optimizer step."""
        config = self._config
        logprobs_n = self._logprobs(self.model, micro)
        base_n = self._base_logprobs(micro)
        if not micro.tokens:  # other ranks have answers, and all run together
            torch.autograd.backward(logprobs_n.sum())
            return nothing(staleness_max + 1, self._ranks.device)
        seen = Seen(
            logprobs_n,
            self._here(micro.rollout_logprobs_n),
            self._here(micro.advantages_n),
            self._here(micro.staleness_n),
            self._here(micro.answers_n),
            proximal_n,
        )
        found = weigh(config, seen)
        shares_n = token_shares(config.mean, totals, seen.answers_n, constant=config.loss_tokens)
        loss = policy_loss(logprobs_n, found.weights_n, seen.advantages_n, shares_n)
        if base_n is not None:
            loss = loss + config.kl_coef * (shares_n * distance_to_base(logprobs_n, base_n)).sum()
        torch.autograd.backward(
            loss * self._ranks.size
        )  # the mean of the ranks' gradients, FSDP's, becomes their sum
        return tally(
            loss,
            found.log_ratio_n,
            found.keeps_n,
            found.corrected_n,
            seen.staleness_n,
            staleness_max + 1,
        )

    def _base_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self._base is None:
            return None
        with torch.no_grad():
            return self._logprobs(self._base, micro)

    def _logprobs(self, model: Any, micro: MicroBatch) -> Tensor:
        return answer_logprobs(
            model, micro.tokens_bt, micro.answer_bt, self._config.temperature, micro.positions_bt
        )

    def _here(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._ranks.device)


def _report(tallied: Tally, norm: float, optimizer_steps: int) -> StepReport:
    """Of a train step; its loss is the mean of its optimizer steps'."""
    return StepReport(
        float(tallied.loss) / optimizer_steps, norm, overall(tallied), by_staleness(tallied)
    )


def _totals(answers: Sequence[Answer]) -> LossTotals:
    return LossTotals(sum(len(each.logprobs_n) for each in answers), len(answers))


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def answer_logprobs(
    model: Any,
    tokens_bt: NDArray[np.int64],
    answer_bt: NDArray[np.bool_],
    temperature: float,
    positions_bt: NDArray[np.int64] | None = None,
) -> Tensor:
    """log p [n] of each answer token under the model at `temperature`, full vocabulary, float32, with gradient.

    No attention mask: rows are padded on the right, attention is causal, and where positions_bt begins at 0 again the
    model lets nobody look further back (`keeps_answers_apart`).
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(tokens_bt).to(device)
    marked = torch.from_numpy(answer_bt).to(device)[
        :, 1:
    ]  # the logits at t are about the token at t + 1
    positions = (
        {} if positions_bt is None else {"position_ids": torch.from_numpy(positions_bt).to(device)}
    )
    logits_btv = model(input_ids=tokens, use_cache=False, **positions).logits[:, :-1]
    logits_nv = logits_btv[marked].float() / temperature
    return -torch.nn.functional.cross_entropy(logits_nv, tokens[:, 1:][marked], reduction="none")


def keeps_answers_apart(model: Any) -> bool:
    """Whether what stands before in the same row leaves an answer's logits as they are."""
    first, second = np.array([[1, 2, 3]]), np.array([[3, 1, 2]])
    together = np.concatenate([first, second], axis=1)
    positions = torch.from_numpy(np.array([[0, 1, 2, 0, 1, 2]])).to(next(model.parameters()).device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = [
            model(
                input_ids=torch.from_numpy(tokens).to(positions.device), use_cache=False, **keywords
            ).logits[0, -1]
            for tokens, keywords in ((second, {}), (together, {"position_ids": positions}))
        ]
    model.train(was_training)
    return bool(torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-4))


def load_model(directory: Path) -> Any:
    """The causal language model in a directory, in float32. OperatorFault: there is none, or no tokenizer."""
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
            f"learner.model: {directory} lacks {', '.join(missing[:3])}; nothing is made up"
        )
    return model


def _base_model(config: LearnerConfig) -> Any:
    """For the distance to the base."""
    return load_model(config.model).requires_grad_(requires_grad=False).eval()


def _checkpoint_layers(model: Any, directory: Path) -> None:
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )  # the older
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise OperatorFault(
            f"learner.gradient_checkpointing: {directory} is a model that cannot: {error}"
        ) from error
