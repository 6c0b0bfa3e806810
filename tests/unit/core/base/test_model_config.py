"""The facts in config.json and generation_config.json."""

from typing import Any

import pytest

from echo2d.core.base.model_config import context_max, end_token_ids, vocab_size


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, None, ()),
        ({"eos_token_id": None}, {}, ()),
        ({"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": [4, 3, 4]}, None, (3, 4)),
        ({"eos_token_id": 3}, {"eos_token_id": [5, 4]}, (4, 5)),
        ({"eos_token_id": 3}, {"eos_token_id": None}, (3,)),
        ({"text_config": {"eos_token_id": 7}}, None, (7,)),
        ({"eos_token_id": ["x", -1, True, 2]}, None, (2,)),
    ],
)
def test_end_tokens_are_read_from_the_generation_config_or_else_from_the_model_config(
    config: dict[str, Any], generation: dict[str, Any] | None, ends: tuple[int, ...]
) -> None:
    assert end_token_ids(config, generation) == ends


@pytest.mark.parametrize(
    ("config", "size", "context"),
    [
        ({}, None, None),
        ({"vocab_size": 17, "max_position_embeddings": 64}, 17, 64),
        ({"vocab_size": 0, "n_positions": 1024}, None, 1024),
        ({"text_config": {"vocab_size": 9, "max_position_embeddings": 8}}, 9, 8),
        ({"vocab_size": "17", "max_position_embeddings": True}, None, None),
    ],
)
def test_sizes_of_a_model_are_positive_numbers_or_unknown(
    config: dict[str, Any], size: int | None, context: int | None
) -> None:
    assert (vocab_size(config), context_max(config)) == (size, context)
