"""Versions as they are copied and written: the bytes that the library would write at the moment of the copy."""

from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo2d.client import Coordinator, Published, StoreFault
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.saving.layout import WeightPart
from echo2d.learner.saving.publish import Publisher, SnapshotWriter
from tests.support.full_disk import files_up_to
from tests.support.polling import poll


class Taken:
    """A coordinator that looks at what is published."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}

    def publish(self, version: int, directory: Path, manifest: bytes | None = None) -> Published:
        self.files[version] = (directory / "model.safetensors").read_bytes()
        return Published(version, "00")


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Weights of several types; JSON escapes the name of one, and the size of one is no multiple of 8 bytes."""
    return {
        "b.weight": torch.randn(5, 7),
        "ä": torch.randn(3).to(torch.bfloat16),
        "counts": torch.arange(4),
        "mask": torch.tensor([True, False, True]),
        "scale": torch.tensor(0.5),
        "empty": torch.zeros(0, 4),
    }


def published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: each.to(torch.bfloat16) if each.is_floating_point() else each
        for name, each in weights.items()
    }


def publisher_of(tmp_path: Path, weights: dict[str, torch.Tensor], taken: Taken) -> Publisher:
    (tmp_path / "base").mkdir()
    save_file(weights, tmp_path / "base" / "model.safetensors")
    layout = {"model.safetensors": {name: WeightPart(name) for name in weights}}
    writer = SnapshotWriter(tmp_path / "base", tmp_path / "snapshots", "run", weights, layout)
    return Publisher(writer, cast("Coordinator", taken), Ranks())


def test_a_version_has_the_bytes_that_the_library_writes(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    taken = Taken()
    publisher = publisher_of(tmp_path, weights, taken)
    publisher.begin(1, 7, weights)
    publisher.settle()
    save_file(published(weights), tmp_path / "expected.safetensors", {"format": "pt"})
    assert taken.files[7] == (tmp_path / "expected.safetensors").read_bytes()
    assert not list((tmp_path / "snapshots").iterdir())


def test_a_version_has_the_weights_of_the_moment_when_its_copy_began(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    """Meanwhile training changes the same tensors in place; the weights may also be bfloat16 already."""
    taken = Taken()
    publisher = publisher_of(tmp_path, weights, taken)
    before = {name: each.clone() for name, each in published(weights).items()}
    publisher.begin(1, 7, weights)
    for each in weights.values():
        each.zero_()
    publisher.begin(1, 8, weights)
    publisher.settle()
    for version, expected in ((7, before), (8, published(weights))):
        (tmp_path / "seen").write_bytes(taken.files[version])
        found = load_file(tmp_path / "seen")
        assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_disk_error_is_reported_before_the_next_version(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    publisher = publisher_of(tmp_path, weights, Taken())
    with files_up_to(100):
        publisher.begin(1, 7, weights)
        going = publisher._going
        poll(lambda: going is not None and going.done())
    with pytest.raises(
        StoreFault, match=r"cannot write the snapshot .*epoch-1-version-7: File too large"
    ):
        publisher.settle(patient=False)
    assert not list((tmp_path / "snapshots").iterdir())
