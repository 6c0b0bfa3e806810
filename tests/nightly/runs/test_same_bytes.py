"""The same seed and batches give the same bytes of weights and moments, in other processes and across a resume."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from echo2d.client import Batch
from tests.support.learner import record
from tests.support.ranks import config_of, together

pytestmark = [pytest.mark.timeout(900)]

STEPS = 4
KINDS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapter": {"lora_rank": 4, "threads": 2},
}


@pytest.fixture(scope="module")
def batches(base: Path) -> list[Batch]:
    return record(base, STEPS)


def trained(directory: Path, ranks: int, batches: list[Batch], config: Any, *halts: int) -> Any:
    """Bytes of the first and the last version, and of the last checkpoint's tensors, by file. halts: steps after which
    new processes go on.
    """
    directory.mkdir()
    made = config_of(directory, **config)
    for step in (*halts, STEPS):
        done = together(directory, dataclasses.replace(made, steps=step), batches, ranks=ranks)
        assert done.returncode == 0, done.stderr
    checkpoint = max((directory / "out" / "checkpoints").iterdir())
    files = {path.name: path for path in checkpoint.glob("*.distcp")}
    for version in (0, STEPS):
        found = (directory / "taken" / str(version)).iterdir()
        files |= {f"{version}/{path.name}": path for path in found}
    return {name: path.read_bytes() for name, path in files.items()}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes_also_across_a_resume(
    tmp_path: Path, base: Path, batches: list[Batch], kind: str, ranks: int
) -> None:
    config = {"base": base, "rng_seed": 7, **KINDS[kind]}
    one = trained(tmp_path / "one", ranks, batches, config)
    halted = trained(tmp_path / "halted", ranks, batches, config, 2)
    assert sum(name.endswith(".distcp") for name in one) == ranks
    assert [name for name in one if one[name] != halted[name]] == []
    if ranks == 1:
        # The groups of each optimizer step are drawn, and the adapter with which the run begins.
        other = trained(tmp_path / "other", ranks, batches, {**config, "rng_seed": 8})
        changed = {name for name in one if one[name] != other[name]}
        weights = "adapter_model.safetensors" if kind == "adapter" else "model.safetensors"
        assert f"{STEPS}/{weights}" in changed
        assert (f"0/{weights}" in changed) == (kind == "adapter")
