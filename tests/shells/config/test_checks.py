"""Warnings about settings that are allowed and yet probably a mistake."""

from pathlib import Path
from typing import Any

import pytest

from echo2d.config.checks import config_cautions
from echo2d.config.coordinator import CoordinatorConfig

MIXTURE = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}


def cautions(folder: Path, model: dict[str, Any], **settings: object) -> list[str]:
    path = folder / "run.toml"
    path.write_text(
        '[run]\n[sampling]\nmax_new_tokens = 100\nvocab_size = 17\n[[task]]\nkind = "sort_digits"\n'
    )
    said = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    return config_cautions(CoordinatorConfig.load(path, said), model, {})


@pytest.mark.parametrize(
    ("model", "tokens", "said"),
    [
        (MIXTURE, 8024, []),
        (MIXTURE, 8025, ["more than 8024 tokens come without their experts (384 bytes a token"]),
        ({"num_hidden_layers": 48}, 100, ['"experts" changes nothing']),
        ({}, 100, []),
    ],
)
def test_experts_that_cannot_come_are_named(
    tmp_path: Path, model: dict[str, Any], tokens: int, said: list[str]
) -> None:
    found = cautions(
        tmp_path, model, policy__columns='["experts"]', sampling__max_new_tokens=tokens
    )
    assert len(found) == len(said)
    assert all(each in line for each, line in zip(said, found, strict=True))
    assert not cautions(tmp_path, model, sampling__max_new_tokens=tokens)
