"""Recipes of echo2d and of TRL side by side, as settings of the learner and of TRL's `GRPOConfig`."""

from dataclasses import dataclass, field
from typing import Any

# TRL's default loss and echo2d's default objective are both the mean over tokens. `correction` is the
# one default without a counterpart in TRL: TRL clips the ratio and does not truncate it as well.
PLAIN = {"correction": "none"}
DUAL_CLIP = {"delta": 3.0}
GSPO = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
RECOMPUTED = {"proximal": "recomputed"}


@dataclass(frozen=True, slots=True)
class SharedRecipe:
    """Settings of the learner and of TRL that belong together.

    vllm: TRL corrects the ratios as it does for engines of vLLM. Otherwise it clips against the
    rollout's logprobs.
    """

    learner: dict[str, Any] = field(default_factory=dict)
    trl: dict[str, Any] = field(default_factory=dict)
    vllm: bool = False


# The gradients are equal.
RECIPES = {
    "the default": SharedRecipe(PLAIN, DUAL_CLIP),
    # The batch has no ratio above this bound. Without any, echo2d refuses the recipe.
    "one-sided clip": SharedRecipe(PLAIN | {"clip_ratio_max": 1000.0}),
    "two-sided clip of 1.5": SharedRecipe(PLAIN | {"clip_ratio_max": 1.5}, {"delta": 1.5}),
    "clip-higher": SharedRecipe(
        PLAIN | {"clip_eps_high": 0.28}, DUAL_CLIP | {"epsilon_high": 0.28}
    ),
    "mean over answers": SharedRecipe(
        PLAIN | {"loss_mean": "sequence"}, DUAL_CLIP | {"loss_type": "grpo"}
    ),
    "dr_grpo": SharedRecipe(
        PLAIN | {"objective": "dr_grpo", "loss_tokens": 50},
        DUAL_CLIP | {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 50},
    ),
    "gspo": SharedRecipe(
        PLAIN | {"objective": "gspo"}, GSPO | {"epsilon": 3e-4, "epsilon_high": 4e-4}
    ),
    "gspo with a wide clip": SharedRecipe(
        PLAIN | {"objective": "gspo", "clip_eps_low": 0.2, "clip_eps_high": 0.2}, GSPO
    ),
    # This objective needs no other setting: its ratios are truncated at tis_cap, 2 by default.
    "cispo": SharedRecipe({"objective": "cispo"}, {"loss_type": "cispo", "epsilon_high": 2.0}),
    "cispo with a low cap": SharedRecipe(
        {"objective": "cispo", "tis_cap": 1.2}, {"loss_type": "cispo", "epsilon_high": 1.2}
    ),
    "recomputed, truncated": SharedRecipe(
        RECOMPUTED | {"tis_cap": 1.2},
        {
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.2,
        },
        vllm=True,
    ),
    "recomputed, masked": SharedRecipe(
        RECOMPUTED | {"correction": "icepop", "mask_low": 0.8, "mask_high": 1.2},
        {
            "vllm_importance_sampling_mode": "token_mask",
            "vllm_importance_sampling_clip_min": 0.8,
            "vllm_importance_sampling_clip_max": 1.2,
        },
        vllm=True,
    ),
    "kl": SharedRecipe(PLAIN | {"kl_coef": 0.1}, DUAL_CLIP | {"beta": 0.1}),
    "kl without weights": SharedRecipe(
        PLAIN | {"kl_coef": 0.1, "kl_weighted": False},
        DUAL_CLIP | {"beta": 0.1, "use_bias_correction_kl": False},
    ),
    "entropy": SharedRecipe(PLAIN | {"entropy_coef": 0.05}, DUAL_CLIP | {"entropy_coef": 0.05}),
}

# The gradients differ by intent.
UNEQUAL = {
    # echo2d also truncates the ratios that its two-sided clip keeps.
    "the default with tis": SharedRecipe({}, DUAL_CLIP),
    # TRL weights the KL term by the ratio of the answer. TRL says itself that only the ratio of the token is right.
    "gspo with kl": SharedRecipe(
        PLAIN | {"objective": "gspo", "kl_coef": 0.1},
        GSPO | {"epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.1},
    ),
    # TRL's entropy is a mean over tokens in any case; echo2d's follows loss_mean.
    "entropy in a mean over answers": SharedRecipe(
        PLAIN | {"loss_mean": "sequence", "entropy_coef": 0.05},
        DUAL_CLIP | {"loss_type": "grpo", "entropy_coef": 0.05},
    ),
}
