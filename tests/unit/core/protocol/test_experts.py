"""The column of experts: which numbers a router can have chosen, and how far two choices differ."""

from typing import Any

import numpy as np
import pytest

from echo2d.core.base.model_config import ExpertNumbers, expert_numbers
from echo2d.core.protocol.columns import columns_fault
from echo2d.core.protocol.experts import ExpertShape, column_of, expert_fault

# The middle one of three layers has no router.
SHAPE = ExpertShape(layers=3, chosen=2, experts=300, routed=(0, 2))
RIGHT = np.array([[[0, 299], [0, 0], [7, 5]], [[1, 2], [0, 0], [3, 4]]], dtype=np.uint16)


def with_value(place: tuple[int, int, int], value: int) -> Any:
    changed = RIGHT.copy()
    changed[place] = value
    return changed


@pytest.mark.parametrize(
    ("experts", "fault"),
    [
        (RIGHT, ""),
        (RIGHT[:0], ""),
        (with_value((1, 1, 0), 999), ""),
        (with_value((1, 2, 0), 300), "expected numbers below 300; found 300"),
        (with_value((0, 0, 0), 299), "expected 2 different ones of each layer; found one twice"),
        (RIGHT[:, :2], r"expected unsigned numbers of shape (3, 2); found uint16 (2, 2)"),
        (RIGHT[..., :1], r"expected unsigned numbers of shape (3, 2); found uint16 (3, 1)"),
        (
            RIGHT.astype(np.float32),
            r"expected unsigned numbers of shape (3, 2); found float32 (3, 2)",
        ),
    ],
)
def test_experts_that_no_router_can_choose_have_a_fault(experts: Any, fault: str) -> None:
    assert SHAPE.fault(experts) == (f"experts: {fault}" if fault else "")


def test_the_difference_is_the_share_of_experts_that_the_other_lacks() -> None:
    assert SHAPE.differing(RIGHT, RIGHT) == 0.0
    assert SHAPE.differing(RIGHT[..., ::-1], RIGHT) == 0.0
    assert SHAPE.differing(with_value((0, 0, 0), 9), RIGHT) == 1 / 4, "of the worst layer"
    assert SHAPE.differing(with_value((0, 1, 0), 9), RIGHT) == 0.0
    assert SHAPE.differing(with_value((0, 0, 0), 300), RIGHT) == 1.0


def test_the_coordinator_refuses_what_no_router_can_choose() -> None:
    """It does not know which layers have routers."""
    numbers = ExpertNumbers(layers=3, chosen=2, experts=300)
    right, twice = column_of(RIGHT, 300), column_of(with_value((0, 0, 0), 299), 300)
    assert expert_fault((right,), numbers) == ""
    assert expert_fault((right._replace(data=b""),), numbers) == "", "no tokens"
    assert expert_fault((twice,), numbers).endswith("expected 2 different ones; found one twice")
    beyond = column_of(with_value((0, 2, 0), 300), 300)
    assert expert_fault((beyond,), numbers) == "experts: expected numbers below 300; found 300"
    for wrong in (right._replace(element="f16"), right._replace(shape=(6,))):
        assert expert_fault((wrong,), numbers).startswith("experts: expected u8 or u16 of (3, 2); ")
    assert expert_fault((twice,), None) == "", "nothing is known"
    assert expert_fault((twice._replace(name="other"),), numbers) == ""


@pytest.mark.parametrize(("experts", "each"), [(256, 1), (257, 2)])
def test_the_column_is_as_narrow_as_the_experts_allow(experts: int, each: int) -> None:
    column = column_of(RIGHT % 256, experts)
    assert columns_fault((column,), len(RIGHT)) == ""
    assert column.token_bytes == 6 * each == ExpertNumbers(3, 2, experts).token_bytes
    assert (column.array == RIGHT % 256).all()


def test_the_config_of_a_mixture_gives_its_numbers() -> None:
    """Qwen3-30B-A3B, and a dense model."""
    config = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
    numbers = expert_numbers(config)
    assert numbers == (48, 8, 128)
    assert numbers.token_bytes == 384
    assert expert_numbers({"text_config": config}) == numbers
    assert expert_numbers({"num_hidden_layers": 48}) is None
