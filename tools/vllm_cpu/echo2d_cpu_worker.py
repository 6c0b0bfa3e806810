"""Our extension of vLLM's worker, with what vLLM 0.32.0 lacks on a CPU.

Linear layers keep their weights in place of a packed copy, without which a tied head keeps its old weights over a load.
A seeded request whose prompt is computed in pieces asks its generator for an offset, which generators of CPUs do not
have.
"""

from typing import Any

import torch
from echo2d_worker import Echo2dWorker
from vllm.model_executor.layers import utils
from vllm.v1.worker import gpu_model_runner


class CpuWorker(Echo2dWorker):  # type: ignore[misc]
    """See the module docstring."""


class _Generator(torch.Generator):
    def get_offset(self) -> int:
        return 0

    def set_offset(self, _: int) -> torch.Generator:
        return self


class _Torch:
    """The module, with another class of generators."""

    Generator = _Generator

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _plain(layer: torch.nn.Module, *_: object, **__: object) -> None:
    layer.__dict__["cpu_linear"] = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _plain
gpu_model_runner.torch = _Torch()
