"""Read and check the [learner] table of the run's TOML file; tables of other programs are ignored.

The coordinator decides staleness bound, publish period, trajectories per step and group size, and
sends them with the session. Relative paths start at the working directory. An OperatorFault names
the key that is wrong.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from echo2d.client import OperatorFault
from echo2d.config_tables import Table, key, read_toml, table_of
from echo2d.sd_notify import Notifier

Mean = Literal["token", "sequence", "constant"]
# The mean that each objective uses when loss_mean is "auto".
MEANS: dict[str, Mean] = {"grpo": "token", "dr_grpo": "constant", "gspo": "sequence"}

# Set by torchrun alone. Other programs set RANK and WORLD_SIZE too.
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Table):
    """The objective and the off-policy corrections. For the formulas see `objectives` and
    `corrections`.
    """

    TABLE: ClassVar[str] = "learner"

    objective: Literal["grpo", "dr_grpo", "gspo"] = key(
        "with gspo use clips of about 3e-4 and 4e-4", "grpo"
    )
    loss_mean: Literal["auto", "token", "sequence", "constant"] = key(
        "over tokens, over answers, or divided by answers * loss_tokens; auto: the objective's own",
        "auto",
    )
    loss_tokens: int = key(
        "for the mean constant: the length of an answer, e.g. sampling.max_new_tokens", 0, low=0
    )
    proximal: Literal["rollout", "recomputed", "loglinear"] = key(
        "what the clip compares with: the rollout's logprobs, those at the step's start "
        "(decoupled PPO), or an interpolation by version",
        "rollout",
    )
    clip_eps_low: float = key(
        "the clip drops negative tokens below 1 - this ratio", 0.2, above=0.0, high=1.0
    )
    clip_eps_high: float = key(
        "the clip drops positive tokens above 1 + this ratio", 0.2, above=0.0
    )
    clip_ratio_max: float = key(
        "two-sided clip: drops negative tokens above this ratio; 0: off", 0.0, low=0.0
    )
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = key(
        "truncate importance ratios, mask tokens, or mask answers and truncate the rest",
        "tis",
    )
    tis_cap: float = key("importance ratios are truncated here", 2.0, low=1.0)
    mask_low: float = key(
        "lower end of the range kept: of tokens (icepop) or answers' means (sequence_mask)",
        0.5,
        low=0.0,
        high=1.0,
    )
    mask_high: float = key("upper end of the range kept", 2.0, low=1.0)
    kl_coef: float = key(
        "weight of the KL distance to the base model; above 0 a second model stays in memory",
        0.0,
        low=0.0,
    )

    def __post_init__(self) -> None:
        Table.__post_init__(self)
        if self.mean == "constant" and not self.loss_tokens:
            raise OperatorFault(
                "learner.loss_tokens: expected at least 1 because the mean is constant; found 0"
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
        """Whether advantages are divided by the standard deviation of their group's rewards."""
        return self.objective != "dr_grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig(Recipe):
    """The whole [learner] table, checked when it is made."""

    url: str = key("the coordinator, https://HOST:PORT; http:// means no TLS")
    token_file: Path = key("created by `echo2d token create NAME --role learner`")
    model: Path = key("base model: a Hugging Face directory with safetensors and a tokenizer")
    snapshot_root: Path = key(
        "the coordinator's run.snapshot_root; versions are published from here"
    )
    out_dir: Path = key("metrics.jsonl and checkpoints/")
    track: tuple[Literal["tensorboard", "wandb"], ...] = key(
        "boards that also show the metrics; each needs its package", ()
    )
    steps: int = key("train until this step", low=1)

    temperature: float = key(
        "refuse a run that samples at another temperature; 0.0: any, the coordinator says it",
        0.0,
        low=0.0,
    )

    cut_off: Literal["train", "filter"] = key(
        "answers that were cut off: train on them, or let them count in the mean of their group alone"
        " (DAPO's overlong filter)",
        "train",
    )
    eval_wait_s: float = key(
        "seconds to wait at the end for the evaluation of the last version", 600.0, low=0.0
    )

    lora_rank: int = key(
        "rank of a LoRA adapter, which alone is trained and published; 0: train the whole model",
        0,
        low=0,
    )
    lora_alpha: float = key(
        "the adapter's output is scaled by lora_alpha / lora_rank", 16.0, above=0.0
    )
    lora_targets: tuple[str, ...] = key(
        "linear layers that get an adapter, by the last part of their names",
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )

    lr: float = key("of AdamW, after the warm-up", 1e-6, above=0.0)
    optimizer_steps: int = key("per train step, each on one part of the batch", 1, low=1, high=64)
    warmup_steps: int = key("train steps of linear warm-up", 10, low=0)
    betas: tuple[float, float] = key("of AdamW", (0.9, 0.95), low=0.0, high=0.9999999)
    weight_decay: float = key("of AdamW", 0.0, low=0.0)
    grad_clip: float = key("the gradient's norm is clipped to this", 1.0, above=0.0)
    micro_batch_tokens: int = key(
        "of one forward and backward pass, padding included", 16384, low=1
    )
    packing: bool = key("put several short answers into a row, if the model supports it", True)
    gradient_checkpointing: bool = key(
        "recompute layers in the backward pass: less memory, a third more work", False
    )
    rng_seed: int = key("for dropout and for dealing groups to optimizer steps", 0, low=0)

    device: str = key(
        "auto, cpu, cuda or cuda:N; under torchrun cuda is a GPU for each rank", "auto"
    )
    threads: int = key("CPU threads of torch; 0: torch decides", 0, low=0, high=1024)
    patience_s: float = key("seconds to wait for an unreachable coordinator", 60.0, above=0.0)
    rank_silence_s: float = key(
        "under torchrun: seconds without a heartbeat after which a rank is lost, and all end",
        120.0,
        low=1.0,
    )
    checkpoint_every: int = key("train steps between checkpoints", 10, low=1, high=250)
    checkpoints_kept: int = key(
        "how many of the newest to keep; from 2 on a damaged one can be skipped", 2, low=1, high=4
    )
    track_samples_every: int = key(
        "train steps between two tables of prompts and answers on the boards; 0: none", 0, low=0
    )
    step_floor_s: float = key(
        "minimum seconds of a train step, to imitate a larger model", 0.0, low=0.0
    )

    @staticmethod
    def load(path: Path) -> "LearnerConfig":
        """Read the table from a TOML file."""
        document = read_toml(path)
        if LearnerConfig.TABLE not in document:
            raise OperatorFault(f"{path}: expected a table [{LearnerConfig.TABLE}]; found none")
        return LearnerConfig.read(table_of(document, LearnerConfig.TABLE))


class Place(NamedTuple):
    """This process among those that torchrun started. local_rank: its index on this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def place() -> Place:
    """This process's place by torchrun's variables; a single rank if torchrun did not start it."""
    if _TORCHRUN_VARIABLE not in os.environ:
        return Place()
    return Place(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def notifier(here: Place) -> Notifier:
    """The service manager's status notifier; only rank 0 reports to it."""
    return Notifier({} if here.rank else os.environ)
