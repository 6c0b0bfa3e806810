"""The processes of one learner: started by torchrun, each with a part of the weights and of every batch; or one alone.

    rank 0 leads    it alone speaks to the coordinator and writes rows and versions
    all             run the same loop in step; what rank 0 learns, or fails at, the others learn by `Channel.share`

A fault ends all of them: whoever fails first says so in one line (`first_to_say`), the others lose their peers and
end in silence. One that is gone without a word is missed by `rank_watchdog`, so words between ranks that are there
may take long. Collectives of torch have no order across threads, so each thread has a channel of its own. Who can
reach the ports of torch.distributed can do anything to these processes: hosts need a network of their own.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

from echo2d.client import OperatorFault
from learner.config import LearnerConfig, Place
from learner.rank_watchdog import LAST_WORD, RankWatchdog

WAIT_S_MAX = (
    7200.0  # for the next word: rank 0 may upload a version for an hour, see `echo2d.client`
)
COLLECTIVE_S_MAX = (
    1800.0  # from the first rank to the last, in a step: before the first one each has read a model
)

_T = TypeVar("_T")


class Channel:
    """Words between all ranks, on the CPU; for one thread. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._group = group  # None: there is one rank

    def share(self, call: Callable[[], _T], *, beat: Callable[[], object] = lambda: None) -> _T:
        """What `call` gives on rank 0, or raises. The others call `beat` each time that rank 0 does `say_wait`."""
        if self._group is None:
            return call()
        if self._rank:
            return cast("_T", self._heed(beat))
        try:
            value = call()
        except Exception as error:
            self._say(error, value=None)
            raise
        self._say(None, value=value)
        return value

    def say_wait(self) -> None:
        """From inside a `share`: it takes longer."""
        self._say(None, value=None, waits=True)

    def gather(self, value: _T) -> list[_T]:
        """Of all ranks, on rank 0; nothing elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = None if self._rank else [None] * self._group.size()
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def any(self, *, flag: bool) -> bool:
        """Whether any rank says so."""
        if self._group is None:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
        return bool(flags)

    def send(self, part: Tensor) -> None:
        """To rank 0."""
        dist.send(part, dst=0, group=self._group)

    def receive(self, part: Tensor, rank: int) -> None:
        dist.recv(part, src=rank, group=self._group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._group

    def _say(self, error: Exception | None, *, value: object, waits: bool = False) -> None:
        dist.broadcast_object_list([(waits, error, value)], src=0, group=self._group)

    def _heed(self, beat: Callable[[], object]) -> Any:
        heard: list[Any] = [(True, None, None)]
        while True:
            dist.broadcast_object_list(heard, src=0, group=self._group)
            waits, error, value = heard[0]
            if error is not None:
                raise error
            if not waits:
                return value
            beat()


class Ranks:
    """This process among `size`; alone unless it comes from `join`."""

    def __init__(
        self, rank: int = 0, size: int = 1, *, device: str = "cpu", wait_s: float = WAIT_S_MAX
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._wait = timedelta(seconds=wait_s)
        self._talk = self.channel()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def channel(self) -> Channel:
        group = dist.new_group(backend="gloo", timeout=self._wait) if self.size > 1 else None
        return Channel(self.rank, group)

    def share(self, call: Callable[[], _T], *, stopped: Callable[[], bool] = lambda: False) -> _T:
        """What `call` gives on rank 0, or raises. For the main thread. stopped: what `beat` asks."""
        return self._talk.share(call, beat=lambda: self._talk.any(flag=stopped()))

    def beat(self, *, stopped: bool) -> bool:
        """From inside a `share`, now and then: whether any rank is stopped."""
        if self.size > 1:
            self._talk.say_wait()
        return self._talk.any(flag=stopped)

    def add_up(self, sums: Tensor) -> Tensor:
        return self._reduce(sums, dist.ReduceOp.SUM)

    def maxima(self, values: Tensor) -> Tensor:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, by: Any) -> Tensor:
        if self.size > 1:
            dist.all_reduce(values, by)
        return values

    def place(self, model: Any) -> Any:
        """On the device: all of it, or this rank's shards of each block and of what is around them (FSDP2).

        A block is whole only while it is being run, forward or backward.
        """
        if self.size == 1:
            return model.to(self.device)
        mesh = init_device_mesh(self.device.type, (self.size,))
        blocks = set(getattr(model, "_no_split_modules", None) or ())
        for module in model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        return model


class Rendezvous:
    """Where the ranks of a torchrun meet: its store, which outlives each of them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store, *_ = next(rendezvous("env://"))
        self._watchdog: RankWatchdog | None = None

    def join(self, config: LearnerConfig, *, lost: Callable[[str], object]) -> Ranks:
        """Wait for the others, unless one of them has had its last word. lost: `RankWatchdog`'s.

        Each rank of a host gets a GPU of its own.
        """
        place = self._place
        store, *_ = next(rendezvous("env://"))
        self._watchdog = RankWatchdog(
            store, place.rank, place.size, silence_s=config.rank_silence_s, lost=lost
        )
        device = device_of(config.device, place)
        on_gpu = device.startswith("cuda")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=PrefixStore("ranks", self._store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=COLLECTIVE_S_MAX),
        )
        return Ranks(place.rank, place.size, device=device, wait_s=WAIT_S_MAX + config.patience_s)

    def leave(self) -> None:
        """After the last word to the others: threads of groups that still stand abort a process that ends."""
        if self._watchdog is not None:
            self._watchdog.leave()
        dist.destroy_process_group()

    def first_to_say(self, line: str) -> bool:
        """Whether no other rank has had its last word before. This one ends from now on."""
        if self._watchdog is not None:
            self._watchdog.end()
        mine = f"{self._place.rank}: {line}"
        try:
            return bool(self._store.compare_set(LAST_WORD, "", mine) == mine.encode())
        except RuntimeError:  # torchrun is gone
            return True

    def is_loss(self, error: Exception) -> bool:
        """Whether torch says that it lost another rank."""
        return isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and "gloo" in str(error)
        )


def device_of(name: str, place: Place) -> str:
    """Where this rank computes. name: learner.device. OperatorFault: there is no such device here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and place.size > 1:
        if name != "cuda":
            raise OperatorFault(
                f"learner.device: expected cuda, of which each rank has its own; found {name}"
            )
        name = f"cuda:{place.local_rank}"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise OperatorFault(f"learner.device: {name!r} is not available: {error}") from error
    return name
