"""The ranks that share each row, so that longer answers fit (learner.context_parallel; Ulysses, arXiv 2309.14509).

    layers      each rank runs them on its slice of the row's tokens
    attention   before it, each rank sends its slice of the queries, keys and values, and receives those of the whole
                row for some of the heads; after it, the outputs go back
    head        each rank scores the answer tokens of its slice; then every rank gets all scores

So each rank computes the loss of the whole row, and its gradient is the part that comes from its own slice. The sum
over the ranks is the gradient of the row.

Suffixes of names: t = tokens of the row, u = tokens of a slice, h = heads of the model, g = heads of a rank, d = head
size, n = answer tokens of the row, s = scores of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


@dataclass(frozen=True, slots=True)
class RowRanks:
    """This process as one of `size` ranks that share each row. The default is a rank with rows of its own."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def own(self, tokens: int) -> slice:
        """This rank's slice of a row of this many tokens, a multiple of `size`."""
        width = tokens // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def by_heads(self, own_uhd: Tensor) -> Tensor:
        """Exchange this rank's tokens of all heads for all tokens of its heads [t, g, d]. If the heads cannot be
        divided, each of them is repeated.
        """
        if self.group is None:
            return own_uhd
        times = 1
        while own_uhd.shape[1] * times % self.size:
            times += 1
        if times > 1:
            own_uhd = own_uhd.repeat_interleave(times, dim=1)
        return self._exchange(torch.stack(own_uhd.chunk(self.size, dim=1))).flatten(0, 1)

    def by_tokens(self, all_tgd: Tensor) -> Tensor:
        """The way back: this rank's tokens of all heads [u, h, d]."""
        if self.group is None:
            return all_tgd
        return torch.cat(self._exchange(torch.stack(all_tgd.chunk(self.size))).unbind(), dim=1)

    def gather(self, own: Sequence[Tensor], first: int, count: int) -> list[Tensor]:
        """The scores [n] of all `count` answer tokens, of which those from `first` on are this rank's own and alone
        have a gradient.
        """
        if self.group is None:
            return list(own)
        end = first + len(own[0])
        all_sn = torch.zeros(len(own), count, device=own[0].device)
        all_sn[:, first:end] = torch.stack([each.detach() for each in own])
        dist.all_reduce(all_sn, group=self.group)
        return [
            torch.cat([all_n[:first], own_n, all_n[end:]])
            for all_n, own_n in zip(all_sn, own, strict=True)
        ]

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i of the first axis to rank i, and receive its part for this rank there."""
        assert self.group is not None
        return all_to_all_single_autograd(parts, None, None, self.group)
