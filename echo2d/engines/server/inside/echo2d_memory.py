"""Writes a version into the memory of a running inference server. It runs inside the server.

This file stands alone: the environment of the server has no echo2d. It takes paths and names of files, never serialized
objects. In the folder ECHO2D_MEMORY each process of the server that holds weights has a Unix socket, and reads orders:

    at the start   record    which bytes of the files lie where in memory; `check`: memory has the words of the files
    before a pause prepare   compares a version's files with memory, and stages the words that differ
    in the pause   apply     the words of before are there -> write the staged ones -> they are there
    after it       check     memory has the words of the files

`record` and `apply` are orders: they are done where the server calls `in_scheduler`, while nothing is generated. The
others are asked by the socket, and run in a thread beside generation.

Recorded are the copies of the model's own `load_weights`. It is called once, with files of the right names and shapes
and without content, while every write into the model's memory is left out. So fused and split tensors, padded
vocabularies, experts and tensor parallel ranks need no table of names. A model whose `load_weights` computes something
from the words, as for most quantized ones, is refused.
"""

import json
import math
import mmap
import os
import socket
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SLICE_BYTES = 4 << 20  # of one comparison
_THREADS_MAX = 8
_PLACES_MAX = 40_000  # of changes that are written together
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_aten = torch.ops.aten


class NotDone(Exception):  # noqa: N818 - not an error in itself
    """The worker's question or order was refused, and no weight was changed."""


class Damaged(Exception):  # noqa: N818
    """The memory may have other weights than before."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a safetensors file."""

    path: Path
    begin: int  # of its bytes in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, *, pinned: bool) -> Tensor:
        """NotDone: the file is shorter."""
        found = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        into, done = memoryview(found.numpy().data), 0
        with self.path.open("rb", buffering=0) as file:
            while done < self.nbytes:
                count = os.preadv(file.fileno(), [into[done:]], self.begin + done)
                if not count:
                    raise NotDone(f"{self.path.name} ends early")
                done += count
        return found.view(self.dtype).view(self.shape)


def tensors_of(directory: str, files: Sequence[str]) -> dict[str, FileTensor]:
    """The tensors of these safetensors files, by name."""
    found: dict[str, FileTensor] = {}
    for name in files:
        path = Path(directory) / name
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for tensor, each in header.items():
            if each["dtype"] not in _DTYPES:
                raise NotDone(f"{tensor} has the type {each['dtype']}")
            begin = 8 + size + int(each["data_offsets"][0])
            found[tensor] = FileTensor(
                path, begin, _DTYPES[each["dtype"]], tuple(map(int, each["shape"]))
            )
    return found


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file's tensor, and the memory that holds it."""

    name: str
    offset: int  # in numbers of the file, as the strides
    strides: tuple[int, ...]
    memory: Tensor  # a view of a parameter, as words
    dtype: torch.dtype  # of the parameter; the file's is converted to it

    def slices(self, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Memory and the new words, a few rows at a time. whole: the tensor of the file."""
        memory, new = self.memory, whole.as_strided(self.memory.shape, self.strides, self.offset)
        if not memory.dim():
            memory, new = memory.view(1), new.view(1)
        rows = max(SLICE_BYTES // max(memory[:1].nbytes, 1), 1)
        for first in range(0, len(memory), rows):
            there = new[first : first + rows].to(memory.device, non_blocking=True)
            yield memory[first : first + rows], there.to(self.dtype).view(memory.dtype)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the copies from files into the model, and leaves out all that would write into the model.

    Operators that copy or convert a file's tensor return that tensor. NotDone: anything else writes into the model.
    """

    def __init__(self, model: torch.nn.Module, files: Mapping[str, FileTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[FilePart] = []
        self._held = _storages(model)
        self._starts: dict[str, int] = {}
        begin = 0
        for name, each in files.items():
            self._starts[name] = begin
            begin += each.nbytes // 64 * 64 + 64  # so that views of any type are aligned
        # Its pages are never touched, so they take no memory.
        noreserve = 0x4000  # MAP_NORESERVE of Linux
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve
        self._room = torch.frombuffer(mmap.mmap(-1, max(begin, 1), flags), dtype=torch.uint8)
        self._files, self._names = files, list(files)
        self._places = list(self._starts.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the files' names and shapes, without content."""
        for name, each in self._files.items():
            whole = self._room[self._starts[name] : self._starts[name] + each.nbytes]
            yield name, whole.view(each.dtype).view(each.shape)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema  # noqa: SLF001
        for place, each in enumerate(schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(each.name)
            for tensor in tree_leaves(given):
                written = each.alias_info is not None and each.alias_info.is_write
                if not isinstance(tensor, Tensor) or not (written or self._is_memory(tensor)):
                    continue
                if not written:
                    self._require_a_view(func)
                elif self._is_memory(tensor):
                    return self._write(func, args)
                elif self._whose(tensor):
                    raise NotDone(f"the model is loaded with {func.name()} on a file's tensor")
        if func is _aten._local_scalar_dense.default and self._whose(args[0]):  # noqa: SLF001
            # As in `fill_(loaded.item())`, which would pass for padding.
            raise NotDone(f"the model computes with the number of {self._whose(args[0])}")
        if func.name() in {"aten::clone", "aten::_to_copy"} and self._whose(args[0]):
            return args[0]
        return func(*args, **kwargs)

    def _require_a_view(self, func: Any) -> None:
        """NotDone: the operator computes something from the model's memory."""
        aliases = [each.alias_info is not None for each in func._schema.returns]  # noqa: SLF001
        if not all(aliases) and not func.name().startswith(("aten::empty_like", "aten::new_empty")):
            raise NotDone(f"the model computes {func.name()} of its weights when it loads")

    def _write(self, func: Any, args: Sequence[Any]) -> Tensor:
        memory: Tensor = args[0]
        fills = func in {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor}
        if fills and not self._whose(args[-1]):
            return memory  # padding, which is there
        if func is not _aten.copy_.default:
            raise NotDone(f"the model is loaded with {func.name()}")
        source: Tensor = args[1]
        name = self._whose(source)
        if not name:
            raise NotDone("the model computes weights from those of the files")
        if source.numel() != memory.numel():
            raise NotDone(f"{name} is repeated in memory")
        first = source.data_ptr() - self._room.data_ptr() - self._starts[name]
        view = source.reshape(memory.shape)
        words = memory.detach().view(_WORDS[memory.element_size()])
        if view.data_ptr() != source.data_ptr():
            raise NotDone(f"{name} has another shape in memory")
        place = first // source.dtype.itemsize
        self.parts.append(FilePart(name, place, tuple(view.stride()), words, memory.dtype))
        return memory

    def _is_memory(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._held

    def _whose(self, tensor: object) -> str:
        """The file's tensor of which this is a view; empty: none."""
        if not isinstance(tensor, Tensor) or tensor.device.type != "cpu":
            return ""
        place = tensor.data_ptr() - self._room.data_ptr()
        if not 0 <= place < len(self._room):
            return ""
        return self._names[bisect_right(self._places, place) - 1]


def _storages(model: torch.nn.Module) -> set[int]:
    """The addresses of the storages of its parameters and buffers."""
    return {each.untyped_storage().data_ptr() for each in _memory_of(model)} - {0}


def _memory_of(model: torch.nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def record(model: torch.nn.Module, files: Mapping[str, FileTensor]) -> list[FilePart]:
    """Where the model's `load_weights` copies what. NotDone: it does more than copy; the weights are as before."""
    _require_no_derived(model)
    recorder, memory = Recorder(model, files), _memory_of(model)
    held = [(each, each.data) for each in memory]
    try:
        with torch.no_grad(), recorder, _one_thread():
            model.load_weights(recorder.tensors())  # type: ignore[operator]
    finally:
        replaced = [each.data_ptr() != data.data_ptr() for each, data in held]
        for each, data in held:
            each.data = data
    if any(replaced):
        raise NotDone("the model replaces its weights when it loads")
    if [*map(id, _memory_of(model))] != [*map(id, memory)]:
        raise Damaged("the model has other parameters after it loads")
    # Of two tensors in the same place, as a tied head may have, the later one counts.
    of = {(each.memory.data_ptr(), each.memory.shape): each for each in recorder.parts}
    found = {each.memory.untyped_storage().data_ptr() for each in of.values()}
    for name, each in model.named_parameters():
        if each.numel() and each.untyped_storage().data_ptr() not in found:
            raise NotDone(f"{name} is not copied from the files")
    return [*of.values()]


def _require_no_derived(model: torch.nn.Module) -> None:
    """NotDone: a module keeps a matrix beside its parameters, which may have been computed from them."""
    held = _storages(model)
    for path, module in model.named_modules():
        for name, each in vars(module).items():
            matrix = isinstance(each, Tensor) and each.dim() in {2, 3} and each.is_floating_point()
            if matrix and each.untyped_storage().data_ptr() not in held and each.numel():
                raise NotDone(f"{path}.{name} may have been computed from the weights")


@contextmanager
def _one_thread() -> Iterator[None]:
    """NotDone: this thread gives work to others, which a dispatch mode does not see."""
    submit, this = ThreadPoolExecutor.submit, threading.get_ident()

    def refused(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == this:
            raise NotDone("the model is loaded by several threads")
        return submit(self, *args, **kwargs)

    ThreadPoolExecutor.submit = refused  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """What changes in one slice of a part.

    places: in words of the whole storage; None: the slice changes as a whole.
    """

    name: str
    memory: Tensor
    places: Tensor | None
    before: Tensor
    after: Tensor

    def write(self) -> bool:
        """Write the new words. False: they are not in memory afterwards. NotDone: memory has other words than when this
        was staged, and nothing was written.
        """
        if self.places is None:
            self.memory.copy_(self.after)
            return torch.equal(self.memory, self.after.to(self.memory.device))
        # One after the other while the words are in the CPU's caches.
        storage, places, before, after = self._on_device(self.places)
        if not torch.equal(storage.index_select(0, places), before):
            raise NotDone(f"{self.name} is not the version that was compared")
        storage.scatter_(0, places, after)
        return torch.equal(storage.index_select(0, places), after)

    def undo(self) -> None:
        if self.places is not None:
            storage, places, before, _ = self._on_device(self.places)
            storage.scatter_(0, places, before)

    def _on_device(self, places: Tensor) -> Sequence[Tensor]:
        """All words of the storage that the memory is a view of, and what is staged for it."""
        count = self.memory.untyped_storage().nbytes() // self.memory.element_size()
        storage = self.memory.as_strided((count,), (1,), 0)
        kept = (places, self.before, self.after)
        return storage, *(each.to(storage.device, non_blocking=True) for each in kept)

    @property
    def nbytes(self) -> int:
        places = 0 if self.places is None else self.places.nbytes
        return places + self.before.nbytes + self.after.nbytes


def _add(found: list[Staged], change: Staged) -> None:
    """Add a change, to the last one if both are small and in the same storage: each costs the pause some calls."""
    last = found[-1] if found else change
    places = 0 if last.places is None else len(last.places)
    small = change.places is not None and places and places + len(change.places) <= _PLACES_MAX
    at = [each.memory.untyped_storage().data_ptr() for each in (last, change)]
    if not small or at[0] != at[1] or last is change:
        found.append(change)
        return
    assert last.places is not None
    assert change.places is not None
    both = ((last.places, change.places), (last.before, change.before), (last.after, change.after))
    joined = [torch.cat(each) for each in both]
    if last.memory.is_cuda:
        joined = [each.pin_memory() for each in joined]
    found[-1] = Staged(last.name, last.memory, *joined)


def _written(each: Staged) -> object:
    """True: the new words are in memory. NotDone: other words than the compared ones were there, and none was written.
    False or another error: the memory may have old and new words.
    """
    try:
        return each.write()
    except Exception as error:  # noqa: BLE001 - told to the worker
        return error


def _each(staged: Sequence[Staged], do: Callable[[Staged], object]) -> dict[Staged, object]:
    """What came of each. On a CPU by several threads: nothing else runs meanwhile."""
    threads = (
        1 if not staged or staged[0].memory.is_cuda else min(os.cpu_count() or 1, _THREADS_MAX)
    )

    @torch.inference_mode()
    def done(each: Staged) -> object:
        return do(each)

    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(staged, pool.map(done, staged), strict=True))


def stage(name: str, memory: Tensor, new: Tensor) -> Staged | None:
    """What changes from memory to the new words; None: nothing."""
    found = (new != memory).flatten().nonzero()[:, 0]
    if not len(found):
        return None

    def kept(words: Tensor) -> Tensor:
        return words.cpu().pin_memory() if memory.is_cuda else words.clone()

    # A place takes 8 bytes.
    if len(found) * (8 + 2 * memory.element_size()) > memory.nbytes:
        return Staged(name, memory, None, new[:0], kept(new))
    before, after = memory.flatten()[found], new.flatten()[found]
    places = torch.full_like(found, int(memory.storage_offset()))
    for size, stride in zip(reversed(memory.shape), reversed(memory.stride()), strict=True):
        places += found % size * stride
        found = found // size
    return Staged(name, memory, kept(places), kept(before), kept(after))


@dataclass(slots=True)
class Inside:
    """The weights of this process, and what is staged for them."""

    model: torch.nn.Module
    parts: list[FilePart] = field(default_factory=list)
    staged: list[Staged] = field(default_factory=list)
    directory: str = ""  # whose words are staged
    number: str = ""  # of the last order
    stream: Any = None  # of a GPU

    def answer(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer a question that came by the socket."""
        match asked["do"]:
            case "prepare":
                return self._prepare(asked)
            case "check":
                return self._check(asked)
            case "forget":
                self.parts, self.staged, self.directory = [], [], ""
                return {}
        raise NotDone(f"unknown: {asked['do']}")

    def run_order(self, folder: Path) -> Mapping[str, Any]:
        """Do what the file order.json says, where nothing is generated, and write what came of it into another file.

        A socket would not do: its thread gets the interpreter only some milliseconds later.
        """
        try:
            asked = json.loads((folder / "order.json").read_text())
        except OSError:
            return {}
        if asked["number"] == self.number:
            return {}
        self.number = asked["number"]
        try:
            if asked["ordered"] == "record":
                self.parts = record(self.model, tensors_of(asked["directory"], asked["files"]))
                done: Mapping[str, Any] = {"parts": len(self.parts)}
            else:
                with torch.inference_mode():
                    done = self._apply(asked)
        except Damaged as error:
            done = {"doubt": str(error)}
        except Exception as error:  # noqa: BLE001 - an error in the scheduler ends the server
            done = _fault(error)
        told = folder / f"{os.getpid()}.told"
        new = told.with_suffix(".new")
        new.write_text(json.dumps({**done, "order": self.number}))
        new.replace(told)
        return done

    def _prepare(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        self.staged, self.directory = [], ""
        found: list[Staged] = []
        limit = asked["share"] * _free_bytes()
        with self._aside():
            for part, whole in self._parts(asked):
                for memory, new in part.slices(whole):
                    change = stage(part.name, memory, new)
                    if change is not None:
                        _add(found, change)
                if sum(each.nbytes for each in found) > limit:
                    raise NotDone("too much changes for the free memory of this machine")
        self.staged, self.directory = found, asked["directory"]
        return {"words": sum(each.after.numel() for each in found)}

    def _apply(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        if asked["directory"] != self.directory:
            raise NotDone("another version is staged")
        self._require_in_place()
        staged, self.staged, self.directory = self.staged, [], ""
        if any(each.memory.is_cuda for each in staged):
            torch.cuda.synchronize()  # a forward pass may be under way on another stream
        # Slices that change as a whole cannot be undone, so they come last.
        for whole in (False, True):
            found = _each([each for each in staged if (each.places is None) == whole], _written)
            refused = [each for each in found.values() if isinstance(each, NotDone)]
            if refused:
                _each([each for each, done in found.items() if done is True], Staged.undo)
                raise refused[0]
            wrong = [each.name for each, done in found.items() if done is not True]
            if wrong:
                return {"doubt": f"{wrong[0]} was not written: {[*found.values()][-1]!r}"}
        return {"done": asked["directory"]}

    def _check(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._aside():
            for part, whole in self._parts(asked):
                for memory, new in part.slices(whole):
                    if not torch.equal(memory, new):
                        raise NotDone(f"{part.name} in memory is not that of the files")
        return {}

    def _aside(self) -> AbstractContextManager[Any]:
        """On a GPU, a stream beside that of the forward passes."""
        device = next(self.model.parameters()).device
        if device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(device)
        self.stream = self.stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self.stream)

    def _require_in_place(self) -> None:
        """NotDone: the parts are no longer the model's memory."""
        held = _storages(self.model)
        if any(part.memory.untyped_storage().data_ptr() not in held for part in self.parts):
            raise NotDone("the model's memory has moved")

    def _parts(self, asked: Mapping[str, Any]) -> Iterator[tuple[FilePart, Tensor]]:
        """Each part with its tensor, of which one is read at a time."""
        self._require_in_place()
        files = tensors_of(asked["directory"], asked["files"])
        of: dict[str, list[FilePart]] = {}
        for part in self.parts:
            of.setdefault(part.name, []).append(part)
        for name, parts in of.items():
            if name not in files:
                raise NotDone(f"{name} is missing")
            whole = files[name].read(pinned=parts[0].memory.is_cuda)
            for part in parts:
                yield part, whole


def _free_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many bytes are available on this machine, and in this container if its memory is limited."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = [1024 * int(facts["MemAvailable"].split()[0])]
    # The two versions of cgroups have different files.
    for folder, most, used, total in (
        (root, "memory.max", "memory.current", ""),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with suppress(OSError, ValueError, KeyError):  # no limit
            limit, now = (int((folder / name).read_text()) for name in (most, used))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # The page cache counts as used, but the kernel frees it when memory is needed.
            cached = sum(int(stat[f"{total}{kind}_file"]) for kind in ("active", "inactive"))
            free.append(limit - now + cached)
    return min(free)


def _fault(error: Exception) -> Mapping[str, Any]:
    return {"error": str(error) if isinstance(error, NotDone) else repr(error)}


_inside: list[Inside] = []  # of this process, once the server called


def in_scheduler(model: torch.nn.Module, _tensors: object = ()) -> Mapping[str, Any]:
    """Do what was ordered. The first call opens the socket. Raises nothing, because that would end the server."""
    try:
        folder = Path(os.environ["ECHO2D_MEMORY"])
        if not _inside:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / f"{os.getpid()}.memory"))
            listener.listen()
            _inside.append(Inside(model))
            threading.Thread(target=_listen, args=(listener, _inside[0]), daemon=True).start()
        return _inside[0].run_order(folder)
    except Exception as error:  # noqa: BLE001 - the worker misses the socket or the file
        sys.stderr.write(f"echo2d: {error!r}\n")
        return {}


def _listen(listener: socket.socket, inside: Inside) -> None:
    """Answer one line on each connection, for ever."""
    with torch.inference_mode():
        while True:
            try:
                connection, _ = listener.accept()
                with connection, connection.makefile("rw") as lines:
                    try:
                        said = inside.answer(json.loads(lines.readline()))
                    except Exception as error:  # noqa: BLE001 - told to the worker
                        said = _fault(error)
                    lines.write(json.dumps(said) + "\n")
            except OSError:
                time.sleep(0.1)  # the worker left, or no file can be opened now
