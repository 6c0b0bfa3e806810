"""Starts SGLang's server on a CPU. A script, not a module: the server's children run its first lines again.

PyPI's torchvision is the CUDA build, whose operators do not load here; SGLang only needs to know their names.
"""

import runpy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # sgl_kernel.py
_operators = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
