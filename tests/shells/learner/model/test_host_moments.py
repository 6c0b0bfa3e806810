"""AdamW's moments in host memory: the weights are those of moments on the device, bit for bit."""

import dataclasses
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from echo2d.learner.model.host_moments import HostMoments
from tests.support.learner import config_in, learn, make_base, record
from tests.support.recorded_learner import Recording

STEPS = 5
OPTIMIZER_STEPS = 4


def test_a_run_that_resumes_makes_the_same_weights_wherever_moments_are(tmp_path: Path) -> None:
    """Twenty optimizer steps. One run resumes with its moments at the other place."""
    base = make_base(tmp_path, layers=2)
    batches = record(base, STEPS)
    taken = {}
    runs: dict[str, list[Literal["device", "host"]]] = {
        "device": ["device", "device"],
        "host": ["host", "host"],
        "moved": ["host", "device"],
    }
    for name, places in runs.items():
        directory = tmp_path / name
        directory.mkdir()
        config = config_in(
            directory,
            base,
            steps=STEPS,
            optimizer_steps=OPTIMIZER_STEPS,
            checkpoint_every=2,
            warmup_steps=0,
        )
        for place, steps in zip(places, (2, STEPS), strict=True):
            changed = dataclasses.replace(config, moments=place, steps=steps)
            learn(changed, Recording(directory, batches), resume=True)
        taken[name] = (directory / "taken" / str(STEPS) / "model.safetensors").read_bytes()
    assert taken["device"] == taken["host"] == taken["moved"]
    assert taken["device"] != (base / "model.safetensors").read_bytes()


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
