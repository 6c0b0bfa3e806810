"""Read and check the [learner] table of the run's TOML file; tables of other programs are ignored.

The coordinator decides staleness bound, publish period, trajectories per step and group size, and
sends them with the session. If the file has a table [run], token_file, snapshot_root and model
default to its values. An OperatorFault names the key that is wrong.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from echo2d.client import OperatorFault
from echo2d.config.run import RunTable, module_folders_of
from echo2d.config.tables import folder_of, read_table, read_toml, table_of, with_settings
from echo2d.core.protocol.experts import EXPERTS
from echo2d.core.rules.table import Table, key
from echo2d.own_modules import require_own
from echo2d.sd_notify import Notifier

Mean = Literal["token", "sequence", "constant"]
AdvantageBaseline = Literal["scaled", "centred", "leave_one_out", "zero"]
Estimator = Literal["k1", "k2", "k3"]
Dtype = Literal["auto", "float32", "bfloat16"]


class Habits(NamedTuple):
    """The defaults of an objective, for keys that the table does not set."""

    mean: Mean
    baseline: AdvantageBaseline
    clip_low: float
    clip_high: float


HABITS = {
    "grpo": Habits("token", "scaled", 0.2, 0.2),
    "dr_grpo": Habits("constant", "centred", 0.2, 0.2),
    "gspo": Habits("sequence", "scaled", 3e-4, 4e-4),
    "cispo": Habits("token", "scaled", 1.0, math.inf),
    "rloo": Habits("token", "leave_one_out", 0.2, 0.2),
    "distill": Habits("token", "zero", 0.2, 0.2),
}
MASKS = {"icepop": (0.5, 5.0), "sequence_mask": (0.5, 2.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Table):
    """The objective and the off-policy corrections. For the formulas see `objectives` and
    `corrections`.
    """

    TABLE: ClassVar[str] = "learner"

    objective: Literal["grpo", "dr_grpo", "gspo", "cispo", "rloo", "distill"] = key(
        "the objective, which decides advantages, ratios and clip; distill: rewards do not count, only the teacher",
        "grpo",
    )
    advantages: str = key(
        "module:function that makes your own advantages [g] from the rewards [g] of a group; with @whole_batch, "
        "those of all groups of the step from all their rewards",
        "",
    )
    loss: str = key(
        "module:function that makes your own losses [n], with gradient, from a WeightInputs", ""
    )
    advantage_std: Literal["sample", "population", "batch"] = key(
        "standard deviation that divides advantages: of the group (TRL and verl: sample), or of the whole batch "
        "(REINFORCE++)",
        "sample",
    )
    teacher: Path | None = key(
        "model directory of a frozen teacher with the policy's tokenizer: trains towards its distribution "
        "(on-policy distillation); it stays in memory",
        None,
    )
    teacher_coef: float = key(
        "a token's advantage gets this times (log p of the teacher - log p of the policy)",
        1.0,
        above=0.0,
    )
    loss_mean: Literal["auto", "token", "sequence", "constant"] = key(
        "mean over tokens, mean over answers, or sum / (answers * loss_tokens); auto: the objective's own",
        "auto",
    )
    loss_tokens: int = key(
        "for the mean constant: assumed tokens of an answer, e.g. sampling.max_new_tokens", 0, low=0
    )
    proximal: Literal["rollout", "recomputed", "loglinear"] = key(
        "logprobs that the clip compares with: the rollout's, those of the weights at the step's start "
        "(decoupled PPO), or an interpolation by version",
        "rollout",
    )
    clip_eps_low: float = key(
        "the clip drops tokens of negative advantage at ratios below 1 - this; 0: the objective's own (0.2, gspo 3e-4)",
        0.0,
        low=0.0,
        high=1.0,
    )
    clip_eps_high: float = key(
        "the clip drops tokens of positive advantage at ratios above 1 + this; 0: the objective's own (0.2, gspo 4e-4)",
        0.0,
        low=0.0,
    )
    clip_ratio_max: float = key(
        "two-sided clip: drops negative-advantage tokens above this ratio; 0: off", 3.0, low=0.0
    )
    correction: Literal[
        "none", "tis", "adaptive_clip", "sequence_tis", "icepop", "sequence_mask"
    ] = key(
        "truncate importance ratios (tis; adaptive_clip also widens the clip of such tokens) or their product over an "
        "answer (sequence_tis), mask tokens (icepop), or mask answers and truncate the rest (sequence_mask)",
        "tis",
    )
    tis_cap: float = key("importance ratios are truncated at this value", 2.0, low=1.0)
    mask_low: float = key(
        "lowest importance ratio that is kept: a token's (icepop), or an answer's mean (sequence_mask); 0 means 0.5",
        0.0,
        low=0.0,
        high=1.0,
    )
    mask_high: float = key(
        "highest ratio that is kept; 0 means 5 for icepop, 2 for sequence_mask", 0.0, low=0.0
    )
    kl_coef: float = key(
        "weight of the KL distance to the base model; above 0 a second model stays in memory",
        0.0,
        low=0.0,
    )
    kl_in: Literal["loss", "reward"] = key(
        "the KL is a term of each token's loss, or its sum over an answer is taken from the answer's reward",
        "loss",
    )
    kl_estimator: Estimator = key(
        "a token's KL, from r = p / base: log r (k1, only in the reward), log(r)^2 / 2 (k2), or 1 / r - 1 + log r (k3)",
        "k3",
    )
    kl_weighted: bool = key(
        "weigh each token's KL in the loss by its importance ratio, so that stale tokens count correctly",
        True,
    )
    entropy_coef: float = key("weight of the entropy of the tokens' distributions", 0.0, low=0.0)

    def __post_init__(self) -> None:
        Table.__post_init__(self)
        if self.mean == "constant" and not self.loss_tokens:
            raise OperatorFault(
                "learner.loss_tokens: expected at least 1 because the mean is constant; found 0"
            )
        if self.objective == "distill" and self.teacher is None:
            raise OperatorFault(
                "learner.teacher: expected a model directory, because the objective is distill; found none"
            )
        if self.objective == "distill" and (self.advantages or self.penalizes):
            own = "advantages: expected none" if self.advantages else "kl_in: expected loss"
            found = f"found {self.advantages or self.kl_in}"
            raise OperatorFault(
                f"learner.{own}, because rewards do not count if the objective is distill; {found}"
            )
        scales = HABITS[self.objective].baseline == "scaled" and not self.advantages
        if self.advantage_std == "batch" and not scales:
            raise OperatorFault(
                "learner.advantage_std: batch divides the advantages of grpo, gspo and cispo; found "
                f"{self.advantages or self.objective} (advantages of your own see the batch with @whole_batch)"
            )
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise OperatorFault(
                "learner.kl_estimator: expected k2 or k3 in the loss, where k1 adds nothing but noise to the gradient; "
                "found k1, which is for kl_in = reward"
            )
        if self.correction == "adaptive_clip" and self.proximal != "recomputed":
            raise OperatorFault(
                "learner.correction: adaptive_clip needs the learner's own probabilities at the step's start: expected "
                f"proximal = recomputed; found {self.proximal}"
            )
        clips, highest = self.objective != "cispo" and self.clip_ratio_max > 0, 1 + self.clip_high
        if clips and self.clip_ratio_max <= highest:
            expected = f"0, or more than 1 + clip_eps_high = {highest:g}"
            raise OperatorFault(
                f"learner.clip_ratio_max: expected {expected}; found {self.clip_ratio_max}"
            )
        corrects = self.proximal == "rollout" and self.correction != "none"
        # With `recomputed`, the ratio p / m has only probabilities of the learner.
        if not (clips or corrects or self.proximal == "recomputed" or self.loss):
            raise OperatorFault(
                "learner.clip_ratio_max, learner.correction: nothing bounds the ratios, so one answer with wrong "
                "logprobs could decide a step: expected clip_ratio_max above 0 (not for cispo), or proximal = rollout "
                f"with a correction; found {self.clip_ratio_max:g}, and {self.proximal} with {self.correction}"
            )

    @property
    def mean(self) -> Mean:
        return HABITS[self.objective].mean if self.loss_mean == "auto" else self.loss_mean

    @property
    def clip_low(self) -> float:
        return self.clip_eps_low or HABITS[self.objective].clip_low

    @property
    def clip_high(self) -> float:
        return self.clip_eps_high or HABITS[self.objective].clip_high

    @property
    def penalizes(self) -> bool:
        """Whether rewards are reduced by the KL to the base."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def mask(self) -> tuple[float, float]:
        """The range of importance ratios that the correction keeps; (0, 0) if it has none."""
        low, high = MASKS.get(self.correction, (0.0, 0.0))
        return self.mask_low or low, self.mask_high or high


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig(Recipe):
    """The whole [learner] table, checked when it is made."""

    url: str = key(
        "the coordinator, https://HOST:PORT; http:// means no TLS; empty: as the token file says",
        "",
    )
    token_file: Path = key(
        "token file of the role learner; `echo2d token create NAME --role learner` makes one for a learner that "
        "runs on another host than the coordinator",
        or_else="RUN_DIR/tokens/learner.token",
    )
    model: Path = key(
        "base model: a Hugging Face directory with safetensors and a tokenizer",
        or_else="run.base_model",
    )
    snapshot_root: Path = key(
        "the coordinator's snapshot_root, to publish from", or_else="run.snapshot_root"
    )
    out_dir: Path = key("directory of metrics.jsonl and checkpoints/", Path("learner"))
    track: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = key(
        "boards that also show the metrics (tensorboard, wandb, mlflow, trackio); each needs its package",
        (),
    )
    steps: int = key("train until this step", low=1)

    cut_off: Literal["train", "filter"] = key(
        "answers that were cut off: train on them, or only count them in the mean of their group (DAPO's "
        "overlong filter)",
        "train",
    )
    eval_wait_s: float = key(
        "seconds to wait at the end for the evaluation of the last version", 600.0, low=0.0
    )

    lora_rank: int = key(
        "rank of a LoRA adapter; only the adapter is trained and published; 0: train the whole model",
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

    lr: float = key("learning rate of AdamW after the warm-up", 1e-6, above=0.0)
    optimizer_steps: int = key("per train step, each on one part of the batch", 1, low=1, high=64)
    warmup_steps: int = key("train steps of linear warm-up", 10, low=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "course of the learning rate between the warm-up and the last step", "constant"
    )
    lr_last_share: float = key(
        "share of lr that linear and cosine reach at the last step", 0.0, low=0.0, high=1.0
    )
    betas: tuple[float, float] = key("betas of AdamW", (0.9, 0.95), low=0.0, high=0.9999999)
    weight_decay: float = key("weight decay of AdamW", 0.0, low=0.0)
    grad_clip: float = key("the gradient's norm is clipped to this", 1.0, above=0.0)
    poison_max: int = key(
        "replace groups whose gradient is not finite at most this often in a row; then the learner stops",
        3,
        low=0,
        high=4,
    )
    micro_batch_tokens: int = key(
        "tokens of one forward and backward pass, including padding", 16384, low=1
    )
    context_parallel: int = key(
        "ranks that share each row, so that longer answers fit; each attends with its share of the heads",
        1,
        low=1,
        high=64,
    )
    row_tokens_max: int = key(
        "most tokens of prompt and answer; 0: with CUDA as --plan says, on a CPU any", 0, low=0
    )
    too_long: Literal["refuse", "truncate"] = key(
        "refuse: do not start if the run's tasks allow answers beyond row_tokens_max, and replace groups whose prompts "
        "leave no room for theirs; truncate: train the first tokens of such answers, with an alert",
        "refuse",
    )
    packing: bool = key("put several short answers into a row, if the model supports it", True)
    recompute: Literal["auto", "none", "selective", "all"] = key(
        "results of a layer that the backward pass computes again, to save memory; selective: all except those of "
        "attention and of every second matrix product; auto: with CUDA the first of none, selective and all with which "
        "the longest answer fits, else none",
        "auto",
    )
    compile: bool = key(
        "compile layers with torch.compile: faster on a GPU, but minutes slower to start", False
    )
    moments: Literal["auto", "device", "host", "8bit"] = key(
        "where AdamW's two moments of each weight are between optimizer steps; host: in memory of the host, "
        "which takes 8 bytes a weight from the devices and gives the same weights; 8bit: on the devices, in two bytes "
        "a weight, which gives others (needs torchao); auto: with CUDA the host if the longest answer does not fit "
        "otherwise, else the device",
        "auto",
    )
    gradient_sync: Literal["each", "last", "host"] = key(
        "ranks sum gradients after each micro-batch of an optimizer step, or only after the last: less traffic, "
        "but every rank holds the whole model's gradient; host: each host has the whole model, its ranks sum "
        "gradients after each micro-batch, and the hosts only after the last",
        "each",
    )
    rng_seed: int = key(
        "random seed of dropout, of a new adapter, and of dealing groups to optimizer steps",
        0,
        low=0,
    )

    dtype: Dtype = key(
        "type of the layers' arithmetic; weights, optimizer, softmax and logprobs are always float32; auto: "
        "bfloat16 with CUDA, else float32",
        "auto",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = key(
        "type in which the ranks sum gradients; bfloat16 halves the traffic and rounds", "float32"
    )
    device: str = key(
        "auto, cpu, cuda or cuda:N; under torchrun, cuda gives each rank its own GPU", "auto"
    )
    threads: int = key("CPU threads of torch; 0: torch decides", 0, low=0, high=1024)
    patience_s: float = key("seconds to wait for an unreachable coordinator", 60.0, above=0.0)
    rank_silence_s: float = key(
        "under torchrun: a rank is lost after this many seconds without a heartbeat, and all end",
        120.0,
        low=1.0,
    )
    checkpoint_every: int = key("train steps between checkpoints", 10, low=1, high=250)
    stop_within_s: float = key(
        "seconds from a signal or a notice to a saved checkpoint; a step that would end too late is left "
        "in the middle, and its batch comes again; torchrun ends its processes 30 s after a signal",
        25.0,
        low=0.0,
    )
    notice: str = key(
        "where to ask whether this machine will be taken away: aws, gcp, azure, file:PATH, or "
        "module:function; a notice has the effect of SIGTERM",
        "",
    )
    checkpoint_url: str = key(
        "fsspec URL, such as s3://bucket/folder; a checkpoint counts only once it is copied there; "
        "empty: no copies",
        "",
    )
    checkpoints_kept: int = key(
        "newest checkpoints to keep; with 2 or more a damaged one can be skipped", 2, low=1, high=4
    )
    track_samples_every: int = key(
        "train steps between two tables of prompts and answers on the boards; 0: none", 0, low=0
    )
    step_floor_s: float = key(
        "minimum seconds of a train step, to imitate a larger model", 0.0, low=0.0
    )

    @staticmethod
    def load(path: Path, settings: Iterable[str] = ()) -> "LearnerConfig":
        """Read the table from a TOML file. settings: TABLE.KEY=VALUE, each of which replaces what the file says."""
        document = with_settings(read_toml(path), settings)
        if LearnerConfig.TABLE not in document:
            raise OperatorFault(
                f"{path}: expected a table [{LearnerConfig.TABLE}]; found none: `echo2d learn "
                "--print-config` prints one, and `echo2d init` fills it in"
            )
        return LearnerConfig.of(document, folder_of(path))

    @staticmethod
    def of(document: Mapping[str, Any], folder: Path = Path()) -> "LearnerConfig":
        """The table of a parsed file. Keys that it leaves out are taken from [run]. folder: the folder of the file."""
        values = dict(table_of(document, LearnerConfig.TABLE))
        if RunTable.TABLE in document:
            run = read_table(RunTable, table_of(document, RunTable.TABLE), folder)
            values.setdefault("token_file", run.run_dir / "tokens" / "learner.token")
            values.setdefault("snapshot_root", run.snapshot_root)
            if run.base_model is not None:
                values.setdefault("model", run.base_model)
        config = read_table(LearnerConfig, values, folder)
        for name, entry in (("advantages", config.advantages), ("loss", config.loss)):
            try:
                if entry:
                    require_own(entry, module_folders_of(document, folder))
            except OperatorFault as fault:
                built_in = (
                    "" if ":" in entry else f"; learner.objective is one of {', '.join(HABITS)}"
                )
                raise OperatorFault(f"learner.{name}: {fault}{built_in}") from fault
        columns = table_of(document, "policy").get("columns")
        if config.compile and isinstance(columns, list) and EXPERTS in columns:
            raise OperatorFault(
                'learner.compile: expected false, because policy.columns has "experts", and routers in compiled layers '
                "cannot replay them; found true"
            )
        return config

    def explicit(self, *, cuda: bool) -> "LearnerConfig":
        """A copy of the config without `auto`. With CUDA, `plan.fitted_on_gpu` chooses better if rows are long."""
        chosen: dict[str, Any] = {}
        if self.dtype == "auto":
            chosen["dtype"] = "bfloat16" if cuda else "float32"
        if self.recompute == "auto":
            chosen["recompute"] = "selective" if cuda else "none"
        if self.moments == "auto":
            chosen["moments"] = "device"
        return replace(self, **chosen)


class Place(NamedTuple):
    """This process among those that torchrun started."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # index on this host
    local_size: int = 1  # ranks on this host


def place() -> Place:
    """This process's place, from torchrun's variables; a single rank if torchrun did not start it."""
    # Only torchrun sets this variable. Other programs set RANK and WORLD_SIZE too.
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Place()
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    return Place(*(int(os.environ[name]) for name in names))


def notifier(here: Place) -> Notifier:
    """The service manager's status notifier; only rank 0 reports to it."""
    return Notifier({} if here.rank else os.environ)


def grow_memory_in_place() -> None:
    """Let a CUDA learner's memory grow in place: holes between tensors took a third of a GPU without this.

    torch reads the variable when it is imported. A value of the operator's stays.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def set_unless_set(variable: str, value: str) -> None:
    """Set an environment variable of a library, unless the operator has set it."""
    os.environ.setdefault(variable, value)
