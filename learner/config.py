"""The [learner] table of the run's TOML file; the other tables belong to other programs and are ignored.

Staleness bound, publish period, trajectories per step and group size are the coordinator's, and come with the session.
Relative paths count from the working directory. Anything wrong is an OperatorFault that names the key.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from echo2d.client import OperatorFault
from echo2d.config_tables import Table, key, read_toml, table_of
from echo2d.sd_notify import Notifier

Mean = Literal["token", "sequence", "constant"]
MEANS: dict[str, Mean] = {
    "grpo": "token",
    "dr_grpo": "constant",
    "gspo": "sequence",
}  # where none is chosen

_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"  # RANK and WORLD_SIZE have other uses elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Table):
    """What is maximised, and what bounds the influence of older versions; in formulas: `objectives`, `corrections`."""

    TABLE: ClassVar[str] = "learner"

    objective: Literal["grpo", "dr_grpo", "gspo"] = key(
        "gspo wants clips of about 3e-4 and 4e-4", "grpo"
    )
    loss_mean: Literal["auto", "token", "sequence", "constant"] = key(
        "over tokens, over answers, or divided by answers * loss_tokens; auto: as the objective wants it",
        "auto",
    )
    loss_tokens: int = key(
        "for the mean constant: the length of an answer, e.g. sampling.max_new_tokens", 0, low=0
    )
    proximal: Literal["rollout", "recomputed", "loglinear"] = key(
        "the clip counts from: the rollout's logprobs, the step's start (decoupled PPO), or in between by version",
        "rollout",
    )
    clip_eps_low: float = key(
        "the clip drops negative tokens below 1 - this ratio", 0.2, above=0.0, high=1.0
    )
    clip_eps_high: float = key(
        "the clip drops positive tokens above 1 + this ratio", 0.2, above=0.0
    )
    clip_ratio_max: float = key(
        "two-sided: it drops negative tokens above this ratio; 0: it does not", 0.0, low=0.0
    )
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = key(
        "importance ratios are truncated, tokens masked, or answers masked and the rest truncated",
        "tis",
    )
    tis_cap: float = key("importance ratios are truncated here", 2.0, low=1.0)
    mask_low: float = key(
        "of tokens (icepop), of answers' geometric means (sequence_mask)", 0.5, low=0.0, high=1.0
    )
    mask_high: float = key("the upper end of that range", 2.0, low=1.0)
    kl_coef: float = key(
        "of the distance to the base model in the loss; above 0 a second model is kept",
        0.0,
        low=0.0,
    )

    def __post_init__(self) -> None:
        Table.__post_init__(self)
        if self.mean == "constant" and not self.loss_tokens:
            raise OperatorFault(
                "learner.loss_tokens: expected at least 1 where the mean is constant; found 0"
            )
        if 0 < self.clip_ratio_max <= 1 + self.clip_eps_high:
            expected = f"0, or more than 1 + clip_eps_high = {1 + self.clip_eps_high:g}"
            raise OperatorFault(
                f"learner.clip_ratio_max: expected {expected}; found {self.clip_ratio_max}"
            )

    @property
    def mean(self) -> Mean:
        return MEANS[self.objective] if self.loss_mean == "auto" else self.loss_mean

    @property
    def scaled(self) -> bool:
        """Whether advantages are in units of their group's standard deviation."""
        return self.objective != "dr_grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig(Recipe):
    """What one learner needs to know; checked when it is made."""

    url: str = key("the coordinator, https://HOST:PORT; http:// means no TLS")
    token_file: Path = key("made by `echo2d token create NAME --role learner`")
    model: Path = key("base model: a Hugging Face directory with safetensors and a tokenizer")
    snapshot_root: Path = key(
        "the coordinator's run.snapshot_root; versions are published from here"
    )
    out_dir: Path = key("metrics.jsonl and checkpoints/")
    track: tuple[Literal["tensorboard", "wandb"], ...] = key(
        "boards that are shown what metrics.jsonl says, each a package of its own", ()
    )
    steps: int = key("train until this step", low=1)

    temperature: float = key("the coordinator's sampling.temperature", 1.0, above=0.0)

    lora_rank: int = key(
        "of a LoRA adapter, which is all that trains and is published; 0: the whole model", 0, low=0
    )
    lora_alpha: float = key(
        "the adapter's share is scaled by lora_alpha / lora_rank", 16.0, above=0.0
    )
    lora_targets: tuple[str, ...] = key(
        "linear layers that have one, by the last part of their names",
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )

    lr: float = key("of AdamW, after the warm-up", 1e-6, above=0.0)
    optimizer_steps: int = key("per train step, each on a part of the batch", 1, low=1, high=64)
    warmup_steps: int = key("train steps of linear warm-up", 10, low=0)
    betas: tuple[float, float] = key("of AdamW", (0.9, 0.95), low=0.0, high=0.9999999)
    weight_decay: float = key("of AdamW", 0.0, low=0.0)
    grad_clip: float = key("the gradient's norm is clipped to this", 1.0, above=0.0)
    micro_batch_tokens: int = key(
        "of one forward and backward pass, padding included", 16384, low=1
    )
    packing: bool = key("several short answers share a row, if the model keeps them apart", True)
    gradient_checkpointing: bool = key(
        "keep only what enters a layer, and run it again in the backward pass: less memory, a third more work",
        False,
    )
    rng_seed: int = key("of all chance: dropout, and which part of a batch comes first", 0, low=0)

    device: str = key(
        "auto, cpu, cuda or cuda:N; under torchrun cuda is a GPU for each rank", "auto"
    )
    threads: int = key("CPU threads of torch; 0: torch decides", 0, low=0, high=1024)
    patience_s: float = key("seconds to wait for a coordinator that is away", 60.0, above=0.0)
    rank_silence_s: float = key(
        "under torchrun: a rank of which nothing is heard for so many seconds is lost, and all end",
        120.0,
        low=1.0,
    )
    checkpoint_every: int = key("train steps between checkpoints", 10, low=1, high=250)
    checkpoints_kept: int = key(
        "the newest are; a damaged one is not missed if there is one before", 2, low=1, high=4
    )
    step_floor_s: float = key(
        "a train step takes at least so long, to imitate a larger model", 0.0, low=0.0
    )

    @staticmethod
    def load(path: Path) -> "LearnerConfig":
        """From a TOML file."""
        document = read_toml(path)
        if LearnerConfig.TABLE not in document:
            raise OperatorFault(f"{path}: expected a table [{LearnerConfig.TABLE}]; found none")
        return LearnerConfig.read(table_of(document, LearnerConfig.TABLE))


class Place(NamedTuple):
    """This process among those that torchrun started; local_rank: among those on this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def place() -> Place:
    """As torchrun says; alone where it did not start this."""
    if _OF_TORCHRUN not in os.environ:
        return Place()
    return Place(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def notifier(here: Place) -> Notifier:
    """Of whoever started this process and wants to be told how it is doing: by the first of them."""
    return Notifier({} if here.rank else os.environ)
