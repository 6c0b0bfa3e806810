"""What the sections of the session report: rows of figures, and what is asked of some of them."""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median

import torch

GB, GIB = 1e9, 2**30
# Packages whose version changes what is measured.
PACKAGES = ("transformers", "triton", "safetensors", "flash-attn", "flash-attn-3", "sglang")


@dataclass(frozen=True, slots=True)
class Row:
    """One case of a section."""

    what: str
    figures: Mapping[str, float | str] = field(default_factory=dict)  # by name, with the unit
    # The bound of a figure, by the figure's name: `at least`, `at most` or `is`, and the value.
    asked: Mapping[str, tuple[str, float | str]] = field(default_factory=dict)
    skipped: str = ""  # why the case was not measured

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda" if on_gpu() else "cpu")


def settle() -> None:
    """Wait until the GPU has done all its work."""
    if on_gpu():
        torch.cuda.synchronize()


def seconds(
    work: Callable[[], object], *, rounds: int = 3, before: Callable[[], object] | None = None
) -> float:
    """The median time of the work, after one run that does not count. before: runs before each, and is not counted."""
    taken = []
    for _ in range(1 + rounds):
        if before is not None:
            before()
        settle()
        began = time.perf_counter()
        work()
        settle()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def facts() -> dict[str, object]:
    """The card, its driver, and the versions of what computes on it."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["CUDA"] = torch.version.cuda or "-"
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "-"
    return {
        "card": torch.cuda.get_device_name() if on_gpu() else "no GPU",
        "driver": _driver() if on_gpu() else "-",
        "versions": versions,
    }


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "not known"
    question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(question, capture_output=True, text=True, check=False).stdout
    return answer.partition("\n")[0].strip() or "not known"
