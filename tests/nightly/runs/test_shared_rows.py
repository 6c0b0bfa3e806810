"""Ranks that share rows compute the gradient of one rank: every objective, correction and kind of layer."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from echo2d.learner.config import LearnerConfig
from tests.support import ranks as runs
from tests.support.learner import config_in, make_base, record, rows_of
from tests.support.model_shapes import saved
from tests.support.shared_rows import Found, alone, check_same, together

pytestmark = [pytest.mark.timeout(900)]

# The family of the model, and the changes of the config, of each recipe.
RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("qwen3", {}),
    "dr_grpo, an answer in each row": (
        "llama",
        {"objective": "dr_grpo", "loss_tokens": 7, "correction": "none", "micro_batch_tokens": 1},
    ),
    "gspo, masked answers": (
        "qwen3",
        {
            "objective": "gspo",
            "correction": "sequence_mask",
            "mask_low": 0.1,
            "mask_high": 30.0,
            "clip_eps_low": 0.8,
            "clip_eps_high": 8.0,
            "clip_ratio_max": 0.0,
        },
    ),
    "cispo, masked tokens": ("qwen3", {"objective": "cispo", "correction": "icepop"}),
    "rloo, recomputed logprobs": ("qwen3", {"objective": "rloo", "proximal": "recomputed"}),
    "loglinear, KL and entropy": (
        "qwen3",
        {"proximal": "loglinear", "kl_coef": 0.1, "entropy_coef": 0.01},
    ),
    "all is computed again": (
        "llama",
        {"kl_coef": 0.1, "kl_weighted": False, "recompute": "all", "micro_batch_tokens": 12},
    ),
    "windows": (
        "mistral with a window",
        {"entropy_coef": 0.1, "recompute": "selective", "micro_batch_tokens": 20},
    ),
    "windows and a soft cap": (
        "gemma3 with windows and a soft cap",
        {"objective": "gspo", "loss_mean": "token", "proximal": "recomputed", "kl_coef": 0.1},
    ),
    "experts": ("qwen3 moe", {"recompute": "selective", "micro_batch_tokens": 12}),
    "experts, an answer in each row": ("mixtral", {"recompute": "all", "micro_batch_tokens": 1}),
    "a teacher alone": ("qwen3", {"objective": "distill", "teacher": "llama"}),
    "an adapter, a teacher, KL in the reward": (
        "qwen3",
        {
            "lora_rank": 4,
            "teacher": "qwen3 moe",
            "kl_coef": 0.1,
            "kl_in": "reward",
            "correction": "sequence_tis",
        },
    ),
    "an adapter": (
        "qwen3",
        {"lora_rank": 4, "kl_coef": 0.1, "gradient_sync": "last", "recompute": "selective"},
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    base = make_base(root / "base")
    return {
        family: saved(root / family, family, base)
        for family in sorted({family for family, _ in RECIPES.values()})
    }


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, str], Found]:
    """What one rank found, by context_parallel and recipe."""
    return {}


@pytest.mark.parametrize(("ranks", "sharing"), [(2, 2), (4, 4), (4, 2)])
def test_ranks_that_share_rows_have_the_gradient_of_one_rank(
    tmp_path: Path,
    models: dict[str, Path],
    expected: dict[tuple[int, str], Found],
    ranks: int,
    sharing: int,
) -> None:
    configs: dict[str, LearnerConfig] = {
        name: config_in(
            tmp_path,
            models[family],
            **{"lr": 1e-8, "micro_batch_tokens": 30, **changes, "context_parallel": sharing}
            | ({"teacher": models[changes["teacher"]]} if "teacher" in changes else {}),
        )
        for name, (family, changes) in RECIPES.items()
    }
    found = together(tmp_path, configs, ranks=ranks)
    errors = []
    for name, config in configs.items():
        if (sharing, name) not in expected:
            expected[sharing, name] = alone(config)
        one, many = expected[sharing, name], found[name]
        errors.append(check_same(name, one, many, same_rows=ranks == sharing))
    print(f"{ranks} ranks, {sharing} share a row: at most {max(errors):.1e}")  # noqa: T201
    for name, each in found.items():
        print(f"{name}: unscored slices {each.unscored}, empty micro-batches {each.empty}")  # noqa: T201
        assert each.shortest <= 3, "fewer tokens than four ranks"
        assert each.unscored > 0
        assert (each.empty > 0) == (ranks > sharing)


def test_a_run_goes_on_with_another_number_of_ranks_that_share_rows(tmp_path: Path) -> None:
    """One rank trains the steps 1 and 2, two that share their rows 3 and 4, one 5 and 6: as one that trains all."""
    base = make_base(tmp_path / "base", layers=2)
    batches = record(base, runs.STEPS)
    rows = []
    for name in ("straight", "handed"):
        directory = tmp_path / name
        directory.mkdir()
        config = runs.config_of(directory, base)
        if name == "handed":
            runs.alone(directory, dataclasses.replace(config, steps=2), batches)
            shared = dataclasses.replace(config, steps=4, context_parallel=2, recompute="all")
            done = runs.together(directory, shared, batches)
            assert done.returncode == 0, done.stderr
        runs.alone(directory, config, batches)
        rows.append(rows_of(config))
    assert [row["step"] for row in rows[1]] == list(range(1, runs.STEPS + 1))
    for one, other in zip(*rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=runs.LOSS_ERROR_MAX)
        assert other["tokens"] == one["tokens"]
        for figure in ("grad_norm", "kl", "entropy"):
            assert other[figure] == pytest.approx(one[figure], rel=1e-3, abs=1e-6)
