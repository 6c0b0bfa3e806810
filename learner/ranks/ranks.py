"""The ranks of one learner: processes started by torchrun, each with a shard of the weights and of
every batch.

    rank 0      talks to the coordinator and writes metrics and versions; no other rank does
    all ranks   run the same loop in step; `Channel.share` broadcasts rank 0's results and errors

A learner without torchrun is one rank, and the same code runs without communication.

The failure of one rank ends all of them. The rank that fails first prints one line
(`is_first_failure`); the others lose their connections and end without output. `watchdog` finds a
rank that disappears without a message, so the timeouts between living ranks may be long.
torch orders collectives per group, not across threads, so each thread has its own channel.

Security: anyone who reaches the ports of torch.distributed controls these processes. Give hosts a
private network.
"""

import atexit
import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from echo2d.client import OperatorFault
from echo2d.learner.config import LearnerConfig, Place
from echo2d.learner.ranks.row_ranks import RowRanks
from echo2d.learner.ranks.watchdog import FIRST_FAILURE, RankWatchdog

# The longest time between two messages: rank 0 may upload a version for an hour, see `echo2d.client`.
_WAIT_S_MAX = 7200.0
# The longest time between the first and the last rank to reach a collective. Before the first collective
# each rank loads the model.
COLLECTIVE_S_MAX = 1800.0

_T = TypeVar("_T")


class Channel:
    """Messages between all ranks on the CPU, for one thread. Every rank must make the same calls in the
    same order.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._group = group  # None for a single rank

    def share(self, call: Callable[[], _T], *, beat: Callable[[], object] = lambda: None) -> _T:
        """Call `call` on rank 0, and return its value, or raise its exception, on every rank.

        The other ranks call `beat` each time that rank 0 calls `keep_waiting`.
        """
        if self._group is None:
            return call()
        if self._rank:
            return cast("_T", self._follow(beat))
        try:
            value = call()
        except Exception as error:
            self._broadcast(error, value=None)
            raise
        self._broadcast(None, value=value)
        return value

    def keep_waiting(self) -> None:
        """Tell the other ranks that the present `share` goes on. Its `call` may call this."""
        self._broadcast(None, value=None, waits=True)

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks on rank 0, an empty list elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = None if self._rank else [None] * self._group.size()
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def any(self, *, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.highest(int(flag)))

    def highest(self, value: int) -> int:
        """The highest value of all ranks, on every rank. It must fit into 32 bits."""
        if self._group is None:
            return value
        values = torch.tensor([value], dtype=torch.int32)
        dist.all_reduce(values, dist.ReduceOp.MAX, self._group)
        return int(values)

    def send(self, part: Tensor) -> None:
        """Send a tensor to rank 0, which calls `receive`."""
        dist.send(part, dst=0, group=self._group)

    def receive(self, part: Tensor, rank: int) -> None:
        dist.recv(part, src=rank, group=self._group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    def _broadcast(self, error: Exception | None, *, value: object, waits: bool = False) -> None:
        dist.broadcast_object_list([(waits, error, value)], src=0, group=self._group)

    def _follow(self, beat: Callable[[], object]) -> Any:
        # torch fills the list in place with the object of rank 0.
        received: list[Any] = [(True, None, None)]
        while True:
            dist.broadcast_object_list(received, src=0, group=self._group)
            waits, error, value = received[0]
            if error is not None:
                raise error
            if not waits:
                return value
            beat()


class Ranks:
    """This process as one of `size` ranks. `Rendezvous.join` makes it; the default is a single
    rank.

    shards: how many consecutive ranks have a whole model between them. on_first_host: how many are on rank 0's host.
    For both, 0 means all ranks.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        shards: int = 0,
        on_first_host: int = 0,
        device: str = "cpu",
        wait_s: float = _WAIT_S_MAX,
    ) -> None:
        self.rank = rank
        self.size = size
        self.shards = shards or size
        self.on_first_host = on_first_host or size
        self.device = torch.device(device)
        self._wait = timedelta(seconds=wait_s)
        self._main_channel = self.channel()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def channel(self) -> Channel:
        group = dist.new_group(backend="gloo", timeout=self._wait) if self.size > 1 else None
        return Channel(self.rank, group)

    def share(self, call: Callable[[], _T], *, stopped: Callable[[], bool] = lambda: False) -> _T:
        """`Channel.share` for the main thread. stopped: whether this rank has been told to stop,
        for `beat`.
        """
        channel = self._main_channel
        return channel.share(call, beat=lambda: channel.any(flag=stopped()))

    def beat(self, *, stopped: bool) -> bool:
        """Whether any rank has been told to stop. Rank 0 calls it from time to time inside a long
        `share`.
        """
        if self.size > 1:
            self._main_channel.keep_waiting()
        return self._main_channel.any(flag=stopped)

    def gather(self, value: _T) -> list[_T]:
        """`Channel.gather` for the main thread."""
        return self._main_channel.gather(value)

    def all_or_none(self, call: Callable[[], _T]) -> _T:
        """Call `call` on every rank, which must not talk to others in it. If it fails on any rank, the first such
        rank's exception is raised on all of them.
        """
        if self.size == 1:
            return call()
        error: Exception | None = None
        try:
            value = call()
        except Exception as own:  # noqa: BLE001 - it is raised below
            error = own
        errors = self.gather(error)
        first = self.share(lambda: next((each for each in errors if each is not None), None))
        if first is not None:
            raise first
        return value

    def highest(self, value: int) -> int:
        """`Channel.highest` for the main thread."""
        return self._main_channel.highest(value)

    def add_up(self, sums: Tensor) -> Tensor:
        return self._reduce(sums, dist.ReduceOp.SUM)

    def maxima(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        """The sum of a number over all ranks, on every rank."""
        return float(self.add_up(torch.tensor(value, dtype=torch.float64, device=self.device)))

    def _reduce(self, values: Tensor, by: Any) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values, by)
        return values

    def row_ranks(self, count: int) -> RowRanks:
        """The `count` consecutive ranks, this one among them, that share each row. All ranks make this call together.

        OperatorFault: the ranks cannot be divided like this.
        """
        if self.size % count:
            raise OperatorFault(
                f"learner.context_parallel: expected a divisor of the number of ranks, {self.size}; found {count}"
            )
        if count == 1:
            return RowRanks()
        wait = timedelta(seconds=COLLECTIVE_S_MAX)
        group, _ = dist.new_subgroups(count, timeout=wait)  # type: ignore[no-untyped-call]
        return RowRanks(self.rank % count, count, group)

    def mesh(self) -> DeviceMesh:
        """The devices of all ranks, [shards] or [hosts, shards]. FSDP2 distributes shards over the last dimension."""
        if not dist.is_initialized():
            _begin_alone(self.device)
        shape, names = (self.size // self.shards, self.shards), ("hosts", "shards")
        first = int(shape[0] == 1)
        return init_device_mesh(self.device.type, shape[first:], mesh_dim_names=names[first:])

    def shard(self, model: Any, config: LearnerConfig) -> Any:
        """Reduce the model to this rank's shards (FSDP2); a single rank keeps all of it. The model may be on the meta
        device.

        A transformer block, the embedding and the head are each gathered only while they run, forward or backward. With
        learner.dtype = bfloat16 they are rounded to bfloat16 when they are gathered, so even a single rank needs FSDP2
        and a mesh. Trained weights stay float32, and their gradients are summed in learner.reduce_dtype. Frozen weights
        are rounded once, here.
        """
        narrow = config.explicit(cuda=self.device.type == "cuda").dtype == "bfloat16"
        if self.size == 1 and not narrow:
            return model
        if narrow:
            for weight in model.parameters():
                if not weight.requires_grad:
                    weight.data = weight.to(torch.bfloat16)
        layers = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if narrow else None,
            reduce_dtype=getattr(torch, config.reduce_dtype),
        )
        # The temperatures are among the arguments of the model and of its head, and are not rounded.
        others = dataclasses.replace(layers, cast_forward_inputs=False)
        mesh = self.mesh()
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=layers)
        for part in (*_ends(model), model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=others)
        return model


class Rendezvous:
    """Where the ranks meet: torchrun's store, which outlives each of them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store, *_ = next(rendezvous("env://"))
        self._watchdog: RankWatchdog | None = None

    def join(self, config: LearnerConfig, *, lost: Callable[[str], object]) -> Ranks:
        """Wait for the other ranks and form the process group. Each rank of a host gets its own GPU.

        lost: called by the watchdog, even during this wait, when a rank has failed or disappeared.
        """
        place = self._place
        # The watchdog needs its own connection, because a blocked call holds its connection.
        store, *_ = next(rendezvous("env://"))
        self._watchdog = RankWatchdog(
            store, place.rank, place.size, silence_s=config.rank_silence_s, lost=lost
        )
        device = device_of(config.device, place)
        on_gpu = device.startswith("cuda")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore("ranks", self._store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=COLLECTIVE_S_MAX),
            # NCCL connects the GPUs now, and not in the first collective of a step.
            device_id=torch.device(device) if on_gpu else None,
        )
        return Ranks(
            place.rank,
            place.size,
            shards=shards_of(config, place),
            on_first_host=place.local_size,
            device=device,
            wait_s=_WAIT_S_MAX + config.patience_s,
        )

    def leave(self) -> None:
        """End in order. The groups are destroyed, because their threads would abort a process that exits."""
        if self._watchdog is not None:
            self._watchdog.leave()
        dist.destroy_process_group()

    def is_first_failure(self, line: str) -> bool:
        """Record this rank's failure. Returns whether it is the first failure of any rank."""
        if self._watchdog is not None:
            self._watchdog.fail()
        mine = f"{self._place.rank}: {line}"
        try:
            return bool(self._store.compare_set(FIRST_FAILURE, "", mine) == mine.encode())
        except RuntimeError:
            # torchrun has ended, and with it the store.
            return True

    @staticmethod
    def is_lost_rank(error: BaseException) -> bool:
        """Whether the error is torch's report of a lost connection to another rank."""
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        )


def shards_of(config: LearnerConfig, place: Place) -> int:
    """How many ranks share a model. OperatorFault: each host has its own, but they have different numbers of ranks."""
    shards = place.local_size if config.gradient_sync == "host" else place.size
    if place.size % shards:
        found = f"{place.local_size} of {place.size} on this host"
        raise OperatorFault(
            f"learner.gradient_sync: host expects as many ranks on each host; found {found}"
        )
    return shards


def layers_of(model: Any) -> list[Any]:
    """The model's transformer blocks. FSDP2 replaces the class of a block by a subclass, so base classes count too."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [
        module
        for module in model.modules()
        if any(kind.__name__ in names for kind in type(module).__mro__)
    ]


def _ends(model: Any) -> list[Any]:
    """The embedding and the head; neither if they share their weights, which FSDP2 keeps in one unit."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    return [] if last is None or first.weight is last.weight else [first, last]


def own_shard(tensor: Tensor) -> Tensor:
    """This rank's part of the tensor: all of it, if it is not sharded."""
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001
    return found


def whole(value: Tensor) -> Tensor:
    """The whole tensor, gathered from the shards of all ranks. All ranks make this call together."""
    if not isinstance(value, DTensor):
        return value
    found: Tensor = value.full_tensor()
    return found


def _begin_alone(device: torch.device) -> None:
    """A process group of this process, for FSDP2 on one rank. It ends with the process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    on_gpu = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, device_id=on_gpu)
    atexit.register(_end_alone)


def _end_alone() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def device_of(name: str, place: Place) -> str:
    """The torch device of this rank, which is torch's current one from now on: FSDP2 gathers weights on that.

    name: learner.device. OperatorFault: this host has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and place.size > 1:
        if name != "cuda":
            raise OperatorFault(
                f"learner.device: expected cuda (each rank gets its own GPU); found {name}"
            )
        name = f"cuda:{place.local_rank}"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise OperatorFault(f"learner.device: {name!r} is not available: {error}") from error
    if name.startswith("cuda"):
        torch.cuda.set_device(name)
        name = f"cuda:{torch.cuda.current_device()}"
    return name
