"""The policy under training: float32 master weights, AdamW, and one optimizer step.

Suffixes of names: b = rows, t = positions, v = vocabulary, n = answer tokens of a micro-batch, in row-major order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from echo2d.client import OperatorFault
from learner import chance, lora
from learner.batches import MicroBatch
from learner.config import LearnerConfig
from learner.corrections import clip_keeps, importance_ratio, truncate
from learner.grpo import policy_loss


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step saw. ratio: rho of `corrections`; clip_share: of the tokens, those the clip dropped."""

    loss: float
    grad_norm: float
    ratio_mean: float
    ratio_max: float
    clip_share: float
    tokens: int


class Policy:
    """Model and optimizer. Everything that a checkpoint must bring back is in `state` and `restore`."""

    def __init__(self, config: LearnerConfig) -> None:
        chance.seed(config.rng_seed)
        if config.threads:
            torch.set_num_threads(config.threads)
        self._config = config
        self._device = _device(config.device)
        self.model = load_model(config.model).to(self._device).train()
        if config.lora_rank:
            lora.attach(self.model, config)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def train_step(self, step: int, micro: Sequence[MicroBatch]) -> StepReport:
        """One optimizer step over the micro-batches of train step `step`.

        FloatingPointError: the gradient is not finite; the weights are as before.
        """
        config = self._config
        step_tokens = sum(len(part.advantages_n) for part in micro)
        tallies = [self._accumulate(part, step_tokens) for part in micro]
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip))
        if not norm < float("inf"):
            self._optimizer.zero_grad()
            raise FloatingPointError(f"train step {step}: the gradient's norm is {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(1, config.warmup_steps))
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss, ratio_sum, ratio_max, dropped = zip(*tallies, strict=True)
        return StepReport(
            loss=sum(loss),
            grad_norm=norm,
            ratio_mean=sum(ratio_sum) / step_tokens,
            ratio_max=max(ratio_max),
            clip_share=sum(dropped) / step_tokens,
            tokens=step_tokens,
        )

    def weights(self) -> dict[str, Tensor]:
        """What trains, and is published."""
        return lora.trained(self.model)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.weights(),
            "optimizer": self._optimizer.state_dict(),
            "rng": chance.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """OperatorFault: the state is another model's."""
        try:
            lora.load_trained(self.model, state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            chance.restore(state["rng"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise OperatorFault(f"the checkpoint does not fit {self._config.model}: {error}") from error

    def _accumulate(self, micro: MicroBatch, step_tokens: int) -> tuple[float, float, float, int]:
        """Add the micro-batch's gradient; returns (loss, sum of ratios, largest ratio, tokens dropped by the clip)."""
        config = self._config
        logprobs_n = answer_logprobs(self.model, micro, config.temperature)
        advantages_n = torch.from_numpy(micro.advantages_n).to(self._device)
        ratio_n = importance_ratio(logprobs_n, torch.from_numpy(micro.rollout_logprobs_n).to(self._device))
        weights_n = truncate(ratio_n, config.tis_cap)
        dropped = 0
        if config.objective == "clip":
            keeps_n = clip_keeps(ratio_n, advantages_n, config.clip_eps_low, config.clip_eps_high)
            weights_n = weights_n * keeps_n
            dropped = int((~keeps_n).sum())
        loss = policy_loss(logprobs_n, weights_n, advantages_n, step_tokens)
        torch.autograd.backward(loss)
        return float(loss.detach()), float(ratio_n.sum()), float(ratio_n.max()), dropped


def answer_logprobs(model: Any, micro: MicroBatch, temperature: float) -> Tensor:
    """log p [n] of each answer token under the model at `temperature`, full vocabulary, float32, with gradient.

    No attention mask: rows are padded on the right, and attention is causal.
    """
    device = next(model.parameters()).device
    tokens_bt = torch.from_numpy(micro.tokens_bt).to(device)
    answer_bt = torch.from_numpy(micro.answer_bt).to(device)[:, 1:]  # the logits at t are about the token at t + 1
    logits_btv = model(input_ids=tokens_bt, use_cache=False).logits[:, :-1]
    logits_nv = logits_btv[answer_bt].float() / temperature
    return -torch.nn.functional.cross_entropy(logits_nv, tokens_bt[:, 1:][answer_bt], reduction="none")


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
        raise OperatorFault(f"learner.model: cannot load {directory}: {' '.join(str(error).split())}") from error
    if missing := sorted(info["missing_keys"]):
        raise OperatorFault(f"learner.model: {directory} lacks {', '.join(missing[:3])}; nothing is made up")
    return model


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise OperatorFault(f"learner.device: {name!r} is not available: {error}") from error
