"""Measure the bytes of a version on the wire in fp8, in full and as a delta, compared with bf16.

    python -m echo2d_lab.research.fp8_delta OLD NEW

OLD, NEW: two successive versions, such as the last of `echo2d_lab.research.rl_updates`. Every matrix becomes
float8_e4m3fn with a scale for each row, a power of two, so that a scale seldom changes; other tensors stay
unchanged. `echo2d bench delta` measures both pairs.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LARGEST = 448.0  # the largest number in float8_e4m3fn


def in_fp8(version: Path, folder: Path) -> Path:
    """A copy of the version with its matrices in fp8."""
    shutil.copytree(version, folder)
    for file in folder.glob("*.safetensors"):
        kept = {}
        for name, tensor in load_file(file).items():
            if tensor.dim() < 2:
                kept[name] = tensor
                continue
            rows = tensor.float()
            scales = torch.exp2((rows.abs().amax(dim=-1, keepdim=True) / LARGEST).log2().ceil())
            kept[name] = (rows / scales).to(torch.float8_e4m3fn)
            kept[f"{name}_scale"] = scales
        save_file(kept, file, {"format": "pt"})
    return folder


def size(version: Path) -> int:
    return sum(file.stat().st_size for file in version.glob("*.safetensors"))


def wire_share(old: Path, new: Path) -> float:
    command = [sys.executable, "-m", "echo2d", "bench", "delta", str(old), str(new), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout)["wire_fraction"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    chosen = parser.parse_args()
    print(f"bf16: a delta takes {wire_share(chosen.old, chosen.new):.3%} of the version's bytes")
    with tempfile.TemporaryDirectory() as scratch:
        old, new = (
            in_fp8(version, Path(scratch) / name)
            for version, name in ((chosen.old, "old"), (chosen.new, "new"))
        )
        smaller = size(new) / size(chosen.new)
        delta = wire_share(old, new)
    print(
        f"fp8: {smaller:.1%} of bf16's bytes in full; a delta takes {delta:.3%} of its own bytes, which "
        f"are {delta * smaller:.3%} of bf16's"
    )


if __name__ == "__main__":
    main()
