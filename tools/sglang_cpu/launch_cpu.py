"""Starts SGLang's server on a CPU. It is a script, not a module: the server's children run its first lines again.

PyPI's torchvision is the CUDA build, whose operators do not load here; SGLang only needs their names. With
--enable-deterministic-inference, SGLang requires GPU kernels that make its numbers independent of the batch. Here it
runs without them, so that its draws from seeds can be tested.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # sgl_kernel.py
_operators = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]

if "--enable-deterministic-inference" in sys.argv:
    from sglang.srt import batch_invariant_ops  # type: ignore[import-not-found]
    from sglang.srt.arg_groups import choices  # type: ignore[import-not-found]

    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None

if "--enable-return-routed-experts" in sys.argv:
    # The experts of each token are kept in host memory, which SGLang registers with CUDA. Here it is plain memory.
    from sglang.srt.mem_cache.pool_host import common  # type: ignore[import-not-found]

    common.ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, dtype, **_: torch.zeros(shape, dtype=dtype)

if "--enable-lora" in sys.argv:
    # SGLang's adapters ask for pinned memory, without a look whether there is an accelerator.
    def _unpinned(make: Any) -> Any:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)  # noqa: ARG005

    for _name in ("empty", "tensor", "zeros", "ones", "arange", "full"):
        setattr(torch, _name, _unpinned(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
