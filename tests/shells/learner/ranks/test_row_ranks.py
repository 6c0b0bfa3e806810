"""Ranks that share rows: the same gradient and report as one rank, and what they refuse."""

import dataclasses
from pathlib import Path

import pytest

from echo2d.client import OperatorFault
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.ranks.row_ranks import RowRanks
from tests.support.learner import config_in
from tests.support.model_shapes import SHAPES, made, saved
from tests.support.shared_rows import alone, check_same, together


def test_two_ranks_that_share_rows_have_the_gradient_and_the_report_of_one_rank(
    tmp_path: Path, base: Path
) -> None:
    """The quick part of tests/nightly/runs/test_shared_rows.py."""
    model = saved(tmp_path / "model", "qwen3 moe", base)
    config = config_in(
        tmp_path,
        model,
        lr=1e-8,
        micro_batch_tokens=14,
        context_parallel=2,
        kl_coef=0.1,
        recompute="selective",
        proximal="recomputed",
    )
    taught = dataclasses.replace(
        config,
        teacher=saved(tmp_path / "teacher", "llama", base),
        kl_in="reward",
        kl_estimator="k1",
    )
    configs = {"experts": config, "teacher and KL in the reward": taught}
    found = together(tmp_path, configs, ranks=2)
    for name, each in configs.items():
        check_same(name, alone(each), found[name])
    assert len(found["teacher and KL in the reward"].penalties) == 14


def test_rows_are_shared_by_all_ranks_or_by_equal_groups_of_them() -> None:
    assert Ranks().row_ranks(1) == RowRanks()
    with pytest.raises(OperatorFault, match=r"divisor of the number of ranks, 1; found 2"):
        Ranks().row_ranks(2)


def test_a_model_whose_rows_cannot_be_shared_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(SHAPES["qwen3"])
    for sharing, packing, needed in (
        (2, False, r"expected 1, because packing is off .*; found 2$"),
        (3, True, r"expected a divisor of the model's 4 attention heads; found 3$"),
    ):
        with pytest.raises(OperatorFault, match=rf"^learner\.context_parallel: {needed}"):
            AnswerScorer(model, packing=packing, row_ranks=RowRanks(0, sharing))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    monkeypatch.setattr(model.config, "rope_parameters", rope)
    with pytest.raises(OperatorFault, match="rotary frequencies depend on the row"):
        AnswerScorer(model, row_ranks=RowRanks(0, 2))
