"""Find the memory of a train step by running it on tensors that have a shape and no numbers.

The model's own code runs, sharded over the ranks: its layers, what they keep for the backward pass, logprobs in
blocks, AdamW. The other ranks are imagined: the process group is a fake that sends nothing. So neither the planned
memory nor the planned devices are needed, and it takes seconds.

Not counted: what a device needs for itself (kernels, communication, gaps between tensors), and on a CPU the memory
that the allocator does not give back.
"""

import dataclasses
import gc
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
from echo2d.learner.model.host_moments import HostMoments
from echo2d.learner.model.layers import prepare_layers
from echo2d.learner.model.live_bytes import LiveBytes
from echo2d.learner.model.load import empty_model
from echo2d.learner.model.scorer import AnswerScorer
from echo2d.learner.ranks.ranks import Channel, Ranks


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one rank's tensors."""

    tokens: int  # of the rows of the train step
    weights: int  # the rank's shards
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
    """Run two optimizer steps of two micro-batches, because the first step makes AdamW's state, and the second
    micro-batch adds to the gradient.
    """
    model = _model(config, ranks)
    row_ranks = ranks.row_ranks(config.context_parallel)
    scorer = AnswerScorer(model, packing=config.packing, probes=False, row_ranks=row_ranks)
    (micro,) = micro_batches(
        [_answer(tokens)], tokens, packed=scorer.packed, multiple=row_ranks.size
    )
    base = None
    if config.kl_coef:
        frozen = dataclasses.replace(config, lora_rank=0)
        base = AnswerScorer(
            _model(frozen, ranks).requires_grad_(requires_grad=False),
            packing=config.packing,
            probes=False,
            row_ranks=row_ranks,
        )
    gc.collect()
    # Until here the whole model exists for a moment, which never happens in the learner, so the peak is reset.
    live.peak = weights = live.now
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    moments = HostMoments(optimizer, copies=False) if config.moments == "host" else None
    for _ in range(2):
        # The peak is reset: in the first step DTensor makes whole tensors for a moment, to find out how an operation
        # is sharded.
        live.peak = live.now
        for _ in range(2):
            _accumulate(micro, scorer, base)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        computing, before = live.peak, live.now
        (moments or optimizer).step()
        # A real fused step allocates only its state. If tensors have no numbers, torch 2.11 also copies the state, so
        # the peak inside the step does not count.
        stepping = live.now if moments is None else before + moments.part_bytes
        optimizer.zero_grad()
    return Footprint(
        tokens, weights, live.now, computing, stepping, 0 if moments is None else moments.bytes
    )


def _accumulate(micro: MicroBatch, scorer: AnswerScorer, base: AnswerScorer | None) -> None:
    loss: Tensor = scorer(micro).logprobs_n.sum()
    if base is not None:
        with torch.no_grad():
            base(micro)
    torch.autograd.backward(loss)


def _model(config: LearnerConfig, ranks: Ranks) -> Any:
    model = empty_model(config.model, on_meta=False)
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
