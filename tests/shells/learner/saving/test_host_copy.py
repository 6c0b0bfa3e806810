"""Copies to host memory: complete, contiguous, and independent of the original."""

import pytest
import torch

from echo2d.learner.saving.host_copy import copy_staged, host_copy


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 100])
def test_a_staged_copy_is_complete(length: int) -> None:
    source = torch.randint(0, 256, (length,), dtype=torch.uint8)
    host, stages = torch.zeros_like(source), (torch.zeros(8, dtype=torch.uint8),) * 2
    copy_staged(source, host, (stages[0].clone(), stages[1].clone()))
    assert torch.equal(host, source)


def test_a_copy_is_contiguous_and_does_not_change_with_its_source() -> None:
    weight = torch.randn(6, 4).t()
    copy = host_copy(weight, torch.bfloat16)
    before = weight.to(torch.bfloat16)
    weight.zero_()
    assert copy.is_contiguous()
    assert torch.equal(copy, before)


@pytest.mark.gpu
def test_a_copy_from_a_gpu_is_complete() -> None:
    weight = torch.randn(40_000_001, device="cuda")  # more than one stage, and an odd end
    assert torch.equal(host_copy(weight, torch.bfloat16), weight.to(torch.bfloat16).cpu())
