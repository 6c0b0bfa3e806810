"""AdamW's moments in host memory make the weights of moments on the device, bit for bit; those of 8 bits nearly."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from echo2d.client import Batch, OperatorFault
from echo2d.learner.model.moments import HostMoments, adamw
from tests.support.learner import config_in, learn, make_base, record
from tests.support.recorded_learner import Recording

STEPS = 5
OPTIMIZER_STEPS = 4


def run_in(
    directory: Path, base: Path, batches: list[Batch], moments: Sequence[Any], **changes: Any
) -> Path:
    """Train STEPS steps, two of them with the first moments, the others with the second. Returns the last version."""
    directory.mkdir()
    settings = {"optimizer_steps": OPTIMIZER_STEPS, "checkpoint_every": 2, "warmup_steps": 0}
    config = config_in(directory, base, **settings, **changes)
    for place, steps in zip(moments, (2, STEPS), strict=True):
        changed = dataclasses.replace(config, moments=place, steps=steps)
        learn(changed, Recording(directory, batches), resume=True)
    return directory / "taken" / str(STEPS)


def flat(model: Path) -> Tensor:
    """All weights of a model, one after the other."""
    found = load_file(model / "model.safetensors")
    return torch.cat([found[name].float().flatten() for name in sorted(found)])


def test_a_run_that_resumes_makes_the_same_weights_wherever_moments_are(tmp_path: Path) -> None:
    """Twenty optimizer steps. One run resumes with its moments at the other place."""
    base = make_base(tmp_path, layers=2)
    batches = record(base, STEPS)
    runs: dict[str, list[Literal["device", "host"]]] = {
        "device": ["device", "device"],
        "host": ["host", "host"],
        "moved": ["host", "device"],
    }
    taken = {
        name: (run_in(tmp_path / name, base, batches, places) / "model.safetensors").read_bytes()
        for name, places in runs.items()
    }
    assert taken["device"] == taken["host"] == taken["moved"]
    assert taken["device"] != (base / "model.safetensors").read_bytes()


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_moments_of_8_bits_make_nearly_the_same_weights(tmp_path: Path) -> None:
    """Twenty optimizer steps. Two of the runs resume with other moments."""
    base = make_base(tmp_path, layers=2)
    batches = record(base, STEPS)
    runs: dict[str, list[Literal["device", "8bit"]]] = {
        "device": ["device", "device"],
        "8bit": ["8bit", "8bit"],
        "from 8bit": ["8bit", "device"],
        "to 8bit": ["device", "8bit"],
    }
    taken = {
        name: flat(run_in(tmp_path / name, base, batches, places, lr=1e-4))
        for name, places in runs.items()
    }
    moved = (taken["device"] - flat(base)).norm()
    for name in ("8bit", "from 8bit", "to 8bit"):
        share = float((taken[name] - taken["device"]).norm() / moved)
        print(f"{name}: {share:.3f} of the way")  # noqa: T201
        assert 0.01 < share < 0.12


@pytest.mark.filterwarnings("ignore::UserWarning:_distutils_hack")
def test_moments_of_8_bits_need_torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    config = config_in(tmp_path, tmp_path, moments="8bit")
    with pytest.raises(OperatorFault, match=r"learner\.moments: 8bit needs torchao: "):
        adamw([], config, on_gpu=False)


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, requires_grad=True) for size in (5, 300, 7, 40, 0)]


def test_a_part_of_the_moments_is_on_the_device_at_a_time() -> None:
    ours, theirs = weights(), weights()
    optimizer = torch.optim.AdamW(ours, lr=1e-2)
    reference = torch.optim.AdamW(theirs, lr=1e-2)
    moments = HostMoments(optimizer, part_bytes_max=400)
    assert moments.bytes == 2 * 4 * (5 + 300 + 7 + 40)
    assert moments.part_bytes == 2 * 4 * 300
    for step in range(20):
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            # In some steps a weight has no gradient.
            gradient = None if (step + number) % 4 == 0 else torch.randn_like(other)
            one.grad, other.grad = gradient, gradient
        moments.step()
        reference.step()
        assert all(map(torch.equal, ours, theirs))
        held = [state["exp_avg"].untyped_storage().nbytes() for state in optimizer.state.values()]
        assert held == [0] * len(ours)
