"""Find the memory of a train step by running it on tensors that have a shape and no numbers.

The model's own code runs, sharded over the ranks: its layers, what they keep for the backward pass, logprobs in
blocks, AdamW. The other ranks are imagined: the process group is a fake that sends nothing. So neither the planned
memory nor the planned devices are needed, and it takes seconds.

Not counted: what a device needs for itself (kernels, communication, gaps between tensors), and on a CPU the memory
that the allocator does not give back.
"""

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from echo2d.learner.batch.packing import MicroBatch, PackedAnswer, micro_batches
from echo2d.learner.config import LearnerConfig
from echo2d.learner.model import logprobs, lora
from echo2d.learner.model.layers import prepare_layers
from echo2d.learner.model.live_bytes import LiveBytes
from echo2d.learner.model.load import empty_model, naming
from echo2d.learner.model.moments import HostMoments
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Channel, Ranks, own_shard


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank's tensors."""

    tokens: int  # of the rows of the train step
    weights: int  # the rank's shards
    trained: int  # those of the weights that are trained, in float32
    resting: int  # between two steps, with AdamW's state
    computing: int  # the most in a forward and backward pass
    stepping: int  # the most in AdamW's step
    moments: int = 0  # of AdamW, in host memory

    @property
    def peak(self) -> int:
        return max(self.computing, self.stepping)


class ImaginedRanks(Ranks):
    """This process as the first of `size` ranks; the others do not exist."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        self._mesh = init_device_mesh("cpu", (size,))

    def channel(self) -> Channel:
        return Channel(0, None)

    def mesh(self) -> DeviceMesh:
        return self._mesh


def footprint(config: LearnerConfig, ranks: int, tokens: int, *, on_gpu: bool) -> Footprint:
    """The memory of each of `ranks` ranks with rows of `tokens` tokens, of one answer each. Within a process, `ranks`
    must always be the same.
    """
    # Compiled layers need real tensors.
    config = dataclasses.replace(config.explicit(cuda=on_gpu), compile=False)
    imagined = ImaginedRanks(ranks)
    blocks = dict(logprobs.LOGIT_BLOCK_BYTES)
    if on_gpu:
        logprobs.LOGIT_BLOCK_BYTES.clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
            return _train(config, imagined, tokens, live)
    finally:
        logprobs.LOGIT_BLOCK_BYTES.update(blocks)


def _train(config: LearnerConfig, ranks: Ranks, tokens: int, live: LiveBytes) -> Footprint:
    """Run an optimizer step of two micro-batches, because the second one adds to the gradient of the first."""
    model = _model(config, ranks)
    row_ranks = ranks.row_ranks(config.context_parallel)
    scorer = AnswerScorer(model, packing=config.packing, probes=False, row_ranks=row_ranks)
    frozen = [config.model] if config.kl_coef else []
    frozen += [config.teacher] if config.teacher else []
    references = []
    for directory in frozen:
        reference = dataclasses.replace(config, model=directory, lora_rank=0)
        with naming("model" if directory == config.model else "teacher"):
            references.append(
                AnswerScorer(
                    _model(reference, ranks, trained=False),
                    packing=config.packing,
                    probes=False,
                    row_ranks=row_ranks,
                )
            )
    packed = all(each.packed for each in (scorer, *references))
    (micro,) = micro_batches([_answer(tokens)], tokens, packed=packed, multiple=row_ranks.size)
    gc.collect()
    weights = live.now
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    moments = HostMoments(optimizer, copies=False) if config.moments != "device" else None
    # A step of zeros comes first. It makes AdamW's state, and DTensor makes whole tensors for a moment in it, to find
    # out how an operation is sharded.
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    (moments or optimizer).step()
    optimizer.zero_grad()
    # The learner never has the whole model at once, as the lines above do, so the peak is reset.
    live.peak = live.now
    for _ in range(2):
        _accumulate(micro, scorer, references)
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    computing, before = live.peak, live.now
    (moments or optimizer).step()
    optimizer.zero_grad()
    # A real fused step allocates nothing. If tensors have no numbers, torch 2.11 also copies the state, so the peak
    # inside the step does not count.
    stepping = before + (moments.part_bytes if moments else 0)
    found = Footprint(
        tokens,
        weights,
        sum(own_shard(weight).nbytes for weight in trained),
        live.now,
        computing,
        stepping,
        moments.bytes if moments else 0,
    )
    if config.moments != "8bit":
        return found
    # An optimizer with moments of 8 bits needs real tensors. It has a byte for each number, and a float32 scale for 256
    # of them.
    small = found.moments // 4 * 65 // 64
    return dataclasses.replace(
        found,
        resting=live.now + small,
        computing=computing + small,
        stepping=before + small,
        moments=0,
    )


def _accumulate(
    micro: MicroBatch, scorer: AnswerScorer, references: Sequence[AnswerScorer]
) -> None:
    loss: Tensor = scorer(micro).logprobs_n.sum()
    with torch.no_grad():
        for reference in references:
            reference(micro)
    torch.autograd.backward(loss)


def _model(config: LearnerConfig, ranks: Ranks, *, trained: bool = True) -> Any:
    model = empty_model(config.model, on_meta=False).requires_grad_(trained)
    if config.lora_rank:
        lora.attach(model, config)
    prepare_layers(model, config, ranks.device)
    return ranks.shard(model, config).train()


def _answer(tokens: int) -> PackedAnswer:
    scored = tokens - 1
    return PackedAnswer(
        group_id=0,
        sample=0,
        tokens=np.zeros(tokens, dtype=np.int32),
        counts=np.arange(tokens) > 0,
        logprobs_n=np.zeros(scored, dtype=np.float32),
        staleness_n=np.zeros(scored, dtype=np.int64),
        advantage=np.float32(1.0),
    )
