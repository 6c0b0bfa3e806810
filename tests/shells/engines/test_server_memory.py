"""Versions written into a server's memory: the module that runs inside the server, and its sockets.

The model here fuses, splits, pads and has experts, as rank 1 of 2; nightly/sglang and nightly/vllm have real servers.
"""

import asyncio
import json
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from echo2d.engines.server.http_client import ServerRefused
from echo2d.engines.server.inside import echo2d_memory
from echo2d.engines.server.inside.echo2d_memory import Inside, NotDone, record, tensors_of
from echo2d.engines.server.memory import ServerMemory
from echo2d.engines.server.weight_files import list_files
from echo2d.engines.server.weight_update import Doubtful, WeightUpdate
from echo2d.errors import EngineFault

HIDDEN, QUERIES, KEYS, MIDDLE, WORDS, EXPERTS = 32, 64, 32, 48, 101, 4
RANK, RANKS = 1, 2
HALF = MIDDLE // RANKS

Words = Iterable[tuple[str, Tensor]]


class Rank(torch.nn.Module):
    """The second half of each layer, laid out as servers do."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "qkv": ((QUERIES + 2 * KEYS) // RANKS, HIDDEN),
            "o": (HIDDEN, QUERIES // RANKS),
            "embed": (64, HIDDEN),
            "w13": (EXPERTS, 2 * HALF, HIDDEN),
            "w2": (EXPERTS, HIDDEN, HALF),
            "norm": (HIDDEN,),
            "scale": (),
        }
        for name, shape in shapes.items():
            empty = torch.zeros(shape, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, words: Words) -> None:
        own = {name: each.data for name, each in self.named_parameters()}
        for name, whole in words:
            self.load(own, name, whole)

    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        def half(dim: int) -> Tensor:
            size = whole.shape[dim] // RANKS
            return whole.narrow(dim, RANK * size, size)

        if name in ("q", "k", "v"):
            first = {"q": 0, "k": QUERIES // RANKS, "v": (QUERIES + KEYS) // RANKS}[name]
            own["qkv"].narrow(0, first, len(half(0))).copy_(half(0))
        elif name == "embed":
            own["embed"][: WORDS - 64].copy_(whole[64:])
            own["embed"][WORDS - 64 :].fill_(0)
        elif name in ("norm", "scale"):
            own[name].copy_(whole)
        elif name == "o":
            own["o"].copy_(half(1).contiguous())
        elif name.startswith("down"):
            own["w2"][int(name[-1])].copy_(half(1))
        else:
            begin = HALF * name.startswith("up")
            own["w13"][int(name[-1])].narrow(0, begin, HALF).copy_(half(0))


def checkpoint(seed: int) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "q": (QUERIES, HIDDEN),
        "k": (KEYS, HIDDEN),
        "v": (KEYS, HIDDEN),
        "o": (HIDDEN, QUERIES),
        "embed": (WORDS, HIDDEN),
        "norm": (HIDDEN,),
        "scale": (),
    }
    for each in range(EXPERTS):
        shapes |= {f"gate{each}": (MIDDLE, HIDDEN), f"up{each}": (MIDDLE, HIDDEN)}
        shapes |= {f"down{each}": (HIDDEN, MIDDLE)}
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}


def changed(words: dict[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """The same checkpoint with this share of the words of each tensor changed, one at least."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, each in words.items():
        flat = each.clone().flatten()
        places = torch.randperm(len(flat), generator=draw)[: max(1, int(share * len(flat)))]
        flat.view(torch.int16)[places] += 1
        found[name] = flat.view(each.shape)
    return found


def bits(numbers: Tensor) -> Tensor:
    return numbers.flatten().view(torch.uint8)


class Site:
    """A model in memory, and versions of its files."""

    def __init__(self, folder: Path, rank: type[Rank] = Rank) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.words = folder, checkpoint(0)
        self.model = rank()
        self.model.load_weights(self.words.items())
        self.inside = Inside(self.model)
        self.first = self.write("0", self.words)

    def write(self, version: str, words: dict[str, Tensor]) -> WeightUpdate:
        """Two files."""
        folder, names = self.folder / version, sorted(words)
        folder.mkdir()
        for number in range(2):
            kept = {name: words[name] for name in names[number::2]}
            save_file(kept, folder / f"{number}.safetensors")
        (folder / "config.json").write_text("{}")
        return WeightUpdate(folder, version, list_files(folder), "retract")

    def asked(self, version: str, **asked: object) -> dict[str, object]:
        folder = self.folder / version
        files = sorted(each.name for each in folder.glob("*.safetensors"))
        return {**asked, "directory": str(folder), "files": files, "share": 0.5}

    def ask(self, version: str, **asked: object) -> dict[str, object]:
        with torch.inference_mode():
            return dict(self.inside.answer(self.asked(version, **asked)))

    def call(self, version: str, what: str) -> dict[str, object]:
        asked = self.asked(version, ordered=what, number=secrets.token_hex(4))
        (self.folder / "order.json").write_text(json.dumps(asked))
        done = self.inside.run_order(self.folder)
        assert self.inside.run_order(self.folder) == {}, "an order is done once"
        told = json.loads((self.folder / f"{os.getpid()}.told").read_text())
        assert told == {**done, "order": asked["number"]}
        return dict(done)

    def require(self, words: dict[str, Tensor]) -> None:
        """The memory is as after a full load, bit for bit."""
        whole = type(self.model)()
        whole.load_weights(words.items())
        for (name, found), expected in zip(
            self.model.named_parameters(), whole.parameters(), strict=True
        ):
            assert torch.equal(bits(found), bits(expected)), name


class _Computes(Rank):
    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole + 1 if name == "norm" else whole)


class _Wider(Rank):
    """A server in float32 of files in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole.float() if name == "norm" else whole)


class _Adds(Rank):
    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole)
        own["norm"].mul_(2)


class _Replaces(Rank):
    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole)
        if name == "norm":
            self.get_parameter("norm").data = whole


class _Threads(Rank):
    """As SGLang loads DeepSeek."""

    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(super().load, own, name, whole).result()


class _Out(Rank):
    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole)
        if name == "norm":
            torch.mul(whole, 2, out=own["norm"])


class _Many(Rank):
    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole)
        if name == "norm":
            torch._foreach_copy_([own["norm"]], [whole])


class _Zeroes(Rank):
    """As GPT-OSS adds a bias on one rank only."""

    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole.zero_() if name == "norm" else whole)


class _Fills(Rank):
    """As SGLang and vLLM load a parameter of one number."""

    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        if name == "scale":
            own["scale"].fill_(whole.item())
        else:
            super().load(own, name, whole)


class _FillsBuffer(Rank):
    """The same for a buffer, and the parameter is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.zeros(1, dtype=torch.bfloat16))

    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole)
        if name == "scale":
            self.fill(self.get_buffer("gain"), whole)

    def fill(self, gain: Tensor, whole: Tensor) -> None:
        gain.fill_(whole.item())


class _FillsByTensor(_FillsBuffer):
    def fill(self, gain: Tensor, whole: Tensor) -> None:
        gain.fill_(whole)


class _Notes(_FillsBuffer):
    """A number beside the model's memory."""

    def fill(self, gain: Tensor, whole: Tensor) -> None:
        self.factor = float(whole)


class _CopiesBuffer(_FillsBuffer):
    def fill(self, gain: Tensor, whole: Tensor) -> None:
        gain.zero_()
        gain.copy_(whole.view(1))


class _Derives(Rank):
    """As DeepSeek keeps a product beside its weights."""

    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole)
        if name == "o":
            self.__dict__["doubled"] = 2 * own["o"]


class _Keeps(Rank):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["beside"] = torch.ones(2, 2)


class _Skips(Rank):
    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        if name != "norm":
            super().load(own, name, whole)


class _Repeats(Rank):
    def load(self, own: dict[str, Tensor], name: str, whole: Tensor) -> None:
        super().load(own, name, whole)
        if name == "scale":
            own["norm"].copy_(whole)


@pytest.mark.parametrize("rank", [Rank, _Wider])
@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_a_version_in_memory_equals_a_full_load(
    tmp_path: Path, share: float, rank: type[Rank]
) -> None:
    site = Site(tmp_path, rank)
    assert site.call("0", "record") == {"parts": 6 + 1 + 3 * EXPERTS}
    site.require(site.words)
    assert site.ask("0", do="check") == {}
    words = site.words
    for number in (1, 2):
        words = changed(words, share, seed=number)
        site.write(str(number), words)
        assert site.ask(str(number), do="prepare")["words"]
        assert site.call(str(number), "apply") == {"done": str(tmp_path / str(number))}
        site.require(words)
        assert site.ask(str(number), do="check") == {}


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (_Computes, "computes weights"),
        (_Adds, "mul_"),
        (_Replaces, "replaces its weights"),
        (_Threads, "several threads"),
        (_Out, "mul"),
        (_Many, "_foreach_copy_"),
        (_Zeroes, "zero_ on a file's tensor"),
        (_Fills, "the number of scale"),
        (_FillsBuffer, "the number of scale"),
        (_FillsByTensor, "fill_"),
        (_Notes, "the number of scale"),
        (_Derives, "may have been computed|of its weights"),
        (_Keeps, "beside may have been computed"),
        (_Skips, "norm is not copied"),
        (_Repeats, "scale is repeated"),
    ],
)
def test_a_model_that_does_more_than_copy_is_refused_and_stays_as_it_was(
    tmp_path: Path, rank: type[Rank], why: str
) -> None:
    site = Site(tmp_path, rank)
    before = [each.clone() for each in site.model.parameters()]
    with pytest.raises(NotDone, match=why):
        record(site.model, tensors_of(str(tmp_path / "0"), ["0.safetensors", "1.safetensors"]))
    assert all(torch.equal(a, b) for a, b in zip(before, site.model.parameters(), strict=True))
    assert re.search(why, str(site.call("0", "record")["error"]))


def test_a_buffer_of_one_number_that_is_copied_changes_with_its_version(tmp_path: Path) -> None:
    site = Site(tmp_path, _CopiesBuffer)
    site.call("0", "record")
    site.write("1", changed(site.words, 0.01, seed=1))
    site.ask("1", do="prepare")
    site.call("1", "apply")
    assert site.model.get_buffer("gain") == site.model.get_parameter("scale")
    assert site.ask("1", do="check") == {}


def test_memory_with_other_words_than_the_files_is_found_at_the_start(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.model.get_parameter("w2")[3, 0, 0] += 1
    site.call("0", "record")
    with pytest.raises(NotDone, match="down3 in memory"):
        site.ask("0", do="check")


def test_nothing_is_written_over_words_that_were_not_compared(tmp_path: Path) -> None:
    """Other slices are written before the mismatch is found; they get their old words back."""
    site = Site(tmp_path)
    site.call("0", "record")
    site.write("1", changed(site.words, 0.01, seed=1))
    site.ask("1", do="prepare")
    last = [each for each in site.inside.staged if each.places is not None][-1]
    assert last.places is not None
    storage = last.memory.as_strided((last.memory.untyped_storage().nbytes() // 2,), (1,), 0)
    storage[last.places[0]] += 1
    before = [each.clone() for each in site.model.parameters()]
    assert "is not the version that was compared" in str(site.call("1", "apply")["error"])
    assert all(torch.equal(a, b) for a, b in zip(before, site.model.parameters(), strict=True))
    assert "another version is staged" in str(site.call("1", "apply")["error"])


def test_a_version_that_needs_too_much_memory_a_short_file_and_a_missing_tensor_are_refused(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.call("0", "record")
    site.write("1", changed(site.words, 1.0, seed=1))
    with pytest.raises(NotDone, match="free memory"):
        site.inside.answer({
            "do": "prepare", "directory": str(tmp_path / "1"), "share": 0.0,
            "files": ["0.safetensors", "1.safetensors"],
        })  # fmt: skip
    os.truncate(tmp_path / "1" / "1.safetensors", 9000)
    with pytest.raises(NotDone, match="ends early"):
        site.ask("1", do="prepare")
    site.write("2", {name: each for name, each in site.words.items() if name != "k"})
    with pytest.raises(NotDone, match="k is missing"):
        site.ask("2", do="prepare")
    assert "another version is staged" in str(site.call("1", "apply")["error"])
    site.require(site.words)


@pytest.mark.parametrize(
    ("folder", "names", "total"),
    [
        ("", ("memory.max", "memory.current"), ""),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)
def test_the_memory_of_a_container_limits_what_is_staged(
    tmp_path: Path, folder: str, names: tuple[str, str], total: str
) -> None:
    """What its processes have read from files counts as available, as it does on the host."""
    at = tmp_path / folder
    at.mkdir(exist_ok=True)
    most, used = (at / name for name in names)
    used.write_text("8000\n")
    stat = f"anon 7000\n{total}inactive_file 200\n{total}active_file 1000\n"
    (at / "memory.stat").write_text(stat)
    assert echo2d_memory._free_bytes(tmp_path) > 1_000_000, "no limit"
    most.write_text("max\n")
    assert echo2d_memory._free_bytes(tmp_path) > 1_000_000, "no limit"
    most.write_text("9000\n")
    assert echo2d_memory._free_bytes(tmp_path) == 2200


def test_memory_that_has_moved_is_not_written_to(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.call("0", "record")
    site.write("1", changed(site.words, 0.01, seed=1))
    site.ask("1", do="prepare")
    norm = site.model.get_parameter("norm")
    norm.data = norm.data.clone()
    assert "has moved" in str(site.call("1", "apply")["error"])
    with pytest.raises(NotDone, match="has moved"):
        site.ask("1", do="check")


@asynccontextmanager
async def listening(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ServerMemory, Callable[[], Awaitable[int]]]]:
    """The sockets of a server, and a call of its scheduler."""
    monkeypatch.setenv("ECHO2D_MEMORY", str(site.folder))
    monkeypatch.setattr(echo2d_memory, "_inside", [])

    async def call() -> int:
        await asyncio.to_thread(echo2d_memory.in_scheduler, site.model)
        site.inside = echo2d_memory._inside[0]
        return 1

    memory = ServerMemory()
    assert await memory.open(site.folder, site.first, call) is not bool(memory.off)
    yield memory, call


async def test_a_version_comes_by_the_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await asyncio.to_thread(Site, tmp_path)
    async with listening(site, monkeypatch) as (memory, call):
        assert memory.off == ""
        words = changed(site.words, 0.02, seed=1)
        order = await asyncio.to_thread(site.write, "1", words)
        assert await memory.prepare(order)
        assert await memory.apply(order, call)
        await memory.check(order)
        site.require(words)


OFF = "all versions are loaded from disk until the worker is started again"


async def test_two_failures_in_a_row_turn_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    site = await asyncio.to_thread(Site, tmp_path)
    async with listening(site, monkeypatch) as (memory, call):
        words = changed(site.words, 0.02, seed=1)
        order = await asyncio.to_thread(site.write, "1", words)
        for _ in range(2):
            assert await memory.prepare(order)
            site.inside.directory = "another"
            assert not await memory.apply(order, call)
            assert await memory.open(site.folder, site.first, call)
        site.require(site.words)
        assert "another version is staged" in memory.off
        assert not await memory.prepare(order)
        assert caplog.text.count(OFF) == 1


async def test_one_lost_call_at_the_start_does_not_turn_it_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time the server is ended; the next one is asked again."""
    caplog.set_level(logging.INFO)

    async def lost() -> int:
        raise Doubtful("no answer")

    memory, order = ServerMemory(), WeightUpdate(tmp_path, "0", [], "retract")
    for turned_off in (False, True):
        with pytest.raises(Doubtful):
            await memory.open(tmp_path, order, lost)
        memory.gone()
        assert bool(memory.off) is turned_off
        assert caplog.text.count(OFF) == turned_off
    assert await memory.open(tmp_path, order, lost)


async def test_files_that_are_read_too_slowly_for_the_check_are_loaded_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check reads them again, and a server whose check does not end in time is ended."""
    site = await asyncio.to_thread(Site, tmp_path)
    async with listening(site, monkeypatch) as (memory, _):
        order = await asyncio.to_thread(site.write, "1", changed(site.words, 0.02, seed=1))
        monkeypatch.setattr("echo2d.engines.server.memory._CHECK_S_MAX", 0.0)
        assert not await memory.prepare(order)
        assert not memory.off
        assert not await memory.prepare(order)
        assert "compared in 0 s, expected at most 0 s" in memory.off
        assert not site.inside.staged
        site.require(site.words)


async def test_memory_that_does_not_have_the_words_afterwards_is_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await asyncio.to_thread(Site, tmp_path)
    async with listening(site, monkeypatch) as (memory, call):
        words = changed(site.words, 0.02, seed=1)
        order = await asyncio.to_thread(site.write, "1", words)
        assert await memory.prepare(order)
        assert await memory.apply(order, call)
        site.model.get_parameter("norm")[0] += 1
        with pytest.raises(Doubtful, match="norm in memory"):
            await memory.check(order)


async def test_a_server_whose_module_is_gone_loads_from_disk_before_and_is_doubtful_within(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await asyncio.to_thread(Site, tmp_path)
    async with listening(site, monkeypatch) as (memory, _):
        order = await asyncio.to_thread(site.write, "1", changed(site.words, 0.02, seed=1))
        assert await memory.prepare(order)

        async def killed() -> int:
            for kind in ("memory", "told"):
                await asyncio.to_thread((tmp_path / f"{os.getpid()}.{kind}").unlink)
            return 1

        with pytest.raises(Doubtful):
            await memory.apply(order, killed)
        assert not await memory.prepare(order)


async def test_a_full_disk_is_no_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = await asyncio.to_thread(Site, tmp_path)
    async with listening(site, monkeypatch) as (memory, call):
        order = await asyncio.to_thread(site.write, "1", changed(site.words, 0.02, seed=1))
        assert await memory.prepare(order)
        await asyncio.to_thread((tmp_path / "order.new").mkdir)  # no file can be written there
        assert not await memory.apply(order, call)
        site.require(site.words)


async def test_a_model_that_is_refused_and_a_server_without_the_module_load_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await asyncio.to_thread(Site, tmp_path / "a", _Computes)
    async with listening(site, monkeypatch) as (memory, _):
        assert "computes weights" in memory.off
        assert not await memory.prepare(site.first)

    async def nothing() -> int:
        return 2

    memory = ServerMemory()
    assert not await memory.open(tmp_path / "b", site.first, nothing)
    assert "0 of 2 processes have a socket" in memory.off


@pytest.mark.parametrize("fault", [EngineFault, ServerRefused])
async def test_only_a_server_that_got_a_call_loads_its_first_version_again(
    tmp_path: Path, fault: type[EngineFault]
) -> None:
    """SGLang before 0.5.23 cannot be called. A newer one that refuses a call may have packed its weights again."""

    async def call() -> int:
        raise fault("no such call")

    memory, order = ServerMemory(), WeightUpdate(tmp_path, "0", [], "retract")
    assert await memory.open(tmp_path, order, call) is (fault is EngineFault)
    assert memory.off == "no such call"
    assert not await memory.prepare(order)
