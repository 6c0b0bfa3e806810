"""Versions as they are copied and written: the bytes that the library would write at the moment of the copy."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from echo2d.client import Coordinator, Published, StoreFault, build_manifest
from echo2d.learner.ranks.ranks import Ranks
from echo2d.learner.saving.layout import Layout, WeightPart
from echo2d.learner.saving.publish import Publisher, SnapshotWriter
from echo2d.learner.saving.shards import Piece, Shards
from tests.support.forked_ranks import outcomes_of
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


def writer_of(tmp_path: Path, weights: dict[str, torch.Tensor], layout: Layout) -> SnapshotWriter:
    """A writer for the model in tmp_path/base, which has the files that a model must have."""
    (tmp_path / "base").mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "base" / name).write_text("{}")
    save_file({}, tmp_path / "base" / "model.safetensors")
    return SnapshotWriter(tmp_path / "base", tmp_path / "snapshots", "run", weights, layout)


def publisher_of(tmp_path: Path, weights: dict[str, torch.Tensor], taken: Taken) -> Publisher:
    layout = {"model.safetensors": {name: WeightPart(name) for name in weights}}
    writer = writer_of(tmp_path, weights, layout)
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


# --- several ranks


class Case(NamedTuple):
    """How the ranks and the weights are spread."""

    ranks: int
    on_first_host: int
    shards: int


CASES = {
    "two ranks": Case(2, on_first_host=2, shards=2),
    "four ranks": Case(4, on_first_host=4, shards=4),
    "two hosts of two ranks": Case(4, on_first_host=2, shards=4),
    "two hosts, each with the whole model": Case(4, on_first_host=2, shards=2),
}
EXPERTS = 6


@pytest.fixture
def layout(weights: dict[str, torch.Tensor]) -> Layout:
    """Two files: the weights, and the halves of the matrices of some experts. Adds the experts to the weights."""
    weights["experts"] = torch.randn(EXPERTS, 4, 3)
    halves = {
        f"experts.{expert}.{name}": WeightPart("experts", expert, first, first + 2)
        for expert in range(EXPERTS)
        for first, name in ((0, "gate"), (2, "up"))
    }
    whole = {name: WeightPart(name) for name in weights if name != "experts"}
    return {"model-1.safetensors": whole, "model-2.safetensors": halves}


def spread(weights: dict[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """The weights as FSDP2 has them; buffers, here those without a dot or an n, are whole on each rank."""
    mesh = ranks.mesh()
    placements = [*([Replicate()] if mesh.ndim == 2 else []), Shard(0)]
    return {
        name: distribute_tensor(each, mesh, placements, src_data_rank=None)
        if name in ("b.weight", "ä", "experts")
        else each
        for name, each in weights.items()
    }


def write_with(
    case: Case,
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    layout: Layout,
    pieces_of: Callable[[Ranks, Iterator[Piece]], Iterator[Piece]] = lambda _, pieces: pieces,
) -> list[str]:
    """Write a version with several ranks. Returns how it ended on each. pieces_of: what a rank gives the writer."""
    writer = writer_of(tmp_path, weights, layout)

    def write(rank: int) -> str:
        ranks = Ranks(rank, case.ranks, on_first_host=case.on_first_host, shards=case.shards)
        sharded = Shards(spread(weights, ranks), writer.tensors, ranks)
        channel = ranks.channel()
        pieces = pieces_of(ranks, sharded.pieces(channel, message_bytes=40))
        directory, manifest = writer.write(1, 7, pieces, channel)
        channel.any(flag=False)  # rank 0 has given the directory its name
        assert manifest == build_manifest(directory).encode()
        return "written"

    return outcomes_of(write, case.ranks, tmp_path)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_several_ranks_write_the_bytes_that_the_library_writes(
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
    layout: Layout,
    case: Case,
) -> None:
    assert write_with(case, tmp_path, weights, layout) == ["written"] * case.ranks
    (directory,) = (tmp_path / "snapshots").iterdir()
    for file, parts in layout.items():
        tensors = {}
        for name, part in parts.items():
            tensor = part.of(published(weights)[part.weight], 0)
            assert tensor is not None
            tensors[name] = tensor.contiguous()
        save_file(tensors, tmp_path / "expected.safetensors", {"format": "pt"})
        assert (directory / file).read_bytes() == (tmp_path / "expected.safetensors").read_bytes()


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize("case", [CASES["four ranks"], CASES["two hosts of two ranks"]])
def test_a_full_disk_of_one_rank_is_reported_by_all_and_leaves_nothing(
    tmp_path: Path, weights: dict[str, torch.Tensor], layout: Layout, case: Case, full: int
) -> None:
    """A rank on another host waits until rank 0 has received its pieces, although rank 0 cannot write them."""

    def pieces_of(ranks: Ranks, pieces: Iterator[Piece]) -> Iterator[Piece]:
        with files_up_to(700 if ranks.rank == full else 1 << 30):
            yield from pieces

    ended = write_with(case, tmp_path, weights, layout, pieces_of)
    directory = tmp_path / "snapshots" / "run-epoch-1-version-7"
    line = f"StoreFault: cannot write the snapshot {directory}: File too large"
    assert ended == [line] * case.ranks
    assert not list((tmp_path / "snapshots").iterdir())


def test_a_rank_that_is_killed_while_it_writes_ends_the_others_and_leaves_nothing(
    tmp_path: Path, weights: dict[str, torch.Tensor], layout: Layout
) -> None:
    def pieces_of(ranks: Ranks, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if ranks.rank == 1:
                os._exit(9)
            yield piece

    ended = write_with(CASES["two ranks"], tmp_path, weights, layout, pieces_of)
    assert ended[1] == "killed"
    assert "gloo" in ended[0]
    assert not list((tmp_path / "snapshots").iterdir())


def test_ranks_beyond_the_first_host_copy_nothing_if_each_host_has_the_model(
    tmp_path: Path, weights: dict[str, torch.Tensor], layout: Layout
) -> None:
    writer = writer_of(tmp_path, weights, layout)

    def copied(rank: int) -> str:
        ranks = Ranks(rank, 4, on_first_host=2, shards=2)
        sharded = spread(weights, ranks)
        local = sum(
            each.to_local().numel() for each in sharded.values() if isinstance(each, DTensor)
        )
        assert local > 0
        return str(bool(Shards(sharded, writer.tensors, ranks)._copies))

    assert outcomes_of(copied, 4, tmp_path) == ["True", "True", "False", "False"]
