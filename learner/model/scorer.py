"""Score the answer tokens of a micro-batch by a model: one pass through its layers, then its head in blocks.

Before training, the scorer runs the model on a few tokens and finds out

- how the model changes the output of its head (`LogitTail`);
- whether the model has the same logits with our attention as with its own;
- whether an answer has the same logits alone, after another answer, and after a shared prompt.

A model that does not support our attention keeps its own, and every answer gets its own row. A model whose logits
differ is refused, unless learner.packing is false.

Suffixes of names: b = rows, t = positions, v = vocabulary, n = answer tokens of a micro-batch, in row-major order.
"""

import logging
import math
from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from echo2d.client import OperatorFault
from echo2d.learner.batch.packing import MicroBatch, Pieces
from echo2d.learner.model.attention import NAME, AttentionPlans, UnknownAttentionError, register
from echo2d.learner.model.logprobs import LogitTail, TokenScores, token_scores, whole_logits
from echo2d.learner.ranks.row_ranks import RowRanks

# The names of methods of the model, and of its head. FSDP2 gathers their weights before it calls these methods.
METHOD = "score_tokens"
READER = "read_logits"
# Layers that `attention` supports.
_KINDS = {"full_attention", "sliding_attention"}
# Prompts of two tokens, each twice, with answers of one. In a layer of experts rounding may send a token to another
# expert, which changes its logits much. So the middle one of the answers must agree, and not all.
PROBE_ROWS = [[*prompt, answer] for prompt in ((3, 1), (1, 4), (5, 2), (2, 6)) for answer in (2, 3)]

log = logging.getLogger("echo2d.learner")


class AnswerScorer:
    """log p and entropy of answer tokens by `model`, a causal language model of transformers."""

    def __init__(
        self,
        model: Any,
        *,
        packing: bool = True,
        probes: bool = True,
        row_ranks: RowRanks | None = None,
    ) -> None:
        """probes: False if the model's weights have no numbers, so that logits cannot be compared. If the
        model then runs with our attention, its logits are assumed to be right. row_ranks: the ranks that share rows.

        OperatorFault: the model's rows cannot be shared, or the learner cannot train the model.
        """
        self.model = model
        self._device = next(model.parameters()).device
        self._probes = probes
        self._tail = _tail(model, self._device) if probes else LogitTail()
        head = model.get_output_embeddings()
        for module, name, method in (
            (model, METHOD, _score),
            (head, METHOD, _apply_head),
            (model, READER, _read),
            (head, READER, _read_head),
        ):
            setattr(module, name, MethodType(method, module))
            if isinstance(module, FSDPModule):
                register_fsdp_forward_method(cast("nn.Module", module), name)
        self.packed = packing and self._takes_our_attention()
        if packing and not self.packed:
            log.warning("packing is off: this model cannot keep the answers of a row apart")
        self._row_ranks = row_ranks or RowRanks()
        if self._row_ranks.size > 1:
            self._check_row_ranks()

    def __call__(self, micro: MicroBatch) -> TokenScores:
        return self.score(
            micro.tokens_bt,
            micro.answer_bt,
            micro.temperatures_n,
            micro.positions_bt,
            micro.pieces,
        )

    def score(
        self,
        tokens_bt: NDArray[np.int64],
        answer_bt: NDArray[np.bool_],
        temperature: float | NDArray[np.float32],
        positions_bt: NDArray[np.int64] | None = None,
        pieces: Pieces | None = None,
    ) -> TokenScores:
        """The scores [n] of the tokens that answer_bt marks, with gradient.

        temperature: at which the tokens were drawn, one for all or one for each [n]. positions_bt, pieces:
        as in `MicroBatch`.
        """
        # The model's output at t is for the token at t + 1.
        rows, columns = np.nonzero(answer_bt[:, 1:])
        places_n = rows * tokens_bt.shape[1] + columns
        drawn_n = tokens_bt[rows, columns + 1]
        return self.score_targets(
            tokens_bt, places_n, drawn_n, positions_bt, pieces, temperature=temperature
        )

    def score_targets(
        self,
        tokens_bt: NDArray[np.int64],
        places_n: NDArray[np.int64],
        targets_n: NDArray[np.int64],
        positions_bt: NDArray[np.int64] | None = None,
        pieces: Pieces | None = None,
        *,
        temperature: float | NDArray[np.float32] = 1.0,
    ) -> TokenScores:
        """The scores [n] of these targets, each from the model's output at its place, with gradient.

        places_n: indices of tokens, counted over all rows, ascending. A place may come several times. The others are
        as in `score`.
        """
        heat_n = np.broadcast_to(np.asarray(temperature, dtype=np.float32), targets_n.shape)
        # A micro-batch without answers has no pieces, and each rank runs all of it.
        row_ranks = RowRanks() if pieces is None else self._row_ranks
        own = row_ranks.own(tokens_bt.size)
        first, end = np.searchsorted(places_n, (own.start, own.stop))
        found: TokenScores = getattr(self.model, METHOD)(
            self._here(tokens_bt[:, own]),
            self._here(places_n[first:end] - own.start),
            self._here(targets_n[first:end]),
            self._here(heat_n[first:end].copy()),
            self._tail,
            self._context(positions_bt, pieces, row_ranks),
        )
        return TokenScores(*row_ranks.gather(found, first, len(places_n)))

    @torch.no_grad()
    def read_logits(
        self,
        tokens_bt: NDArray[np.int64],
        places_n: NDArray[np.int64],
        positions_bt: NDArray[np.int64] | None,
        pieces: Pieces | None,
        read: Callable[[Tensor], object],
    ) -> None:
        """Call `read` with the logits [some of n, v] at these places, a few of them at a time. The other arguments are
        those of `score_targets`. Ranks that share the weights read the same. Not for ranks that share rows.
        """
        getattr(self.model, READER)(
            self._here(tokens_bt),
            self._here(places_n),
            read,
            self._tail,
            self._context(positions_bt, pieces, RowRanks()),
        )

    def _context(
        self, positions_bt: NDArray[np.int64] | None, pieces: Pieces | None, row_ranks: RowRanks
    ) -> dict[str, Any]:
        """Keywords for the model that keep the answers of a row apart."""
        context: dict[str, Any] = {}
        if positions_bt is not None:
            context["position_ids"] = self._here(positions_bt[:, row_ranks.own(positions_bt.size)])
        if pieces is not None:
            context["pieces"] = AttentionPlans(pieces, self._device, row_ranks)
        return context

    def _here(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _takes_our_attention(self) -> bool:
        """Give the model our attention. False: ours does not fit, and the model keeps its own."""
        model = self.model
        config = model.config.get_text_config()
        own = model.config._attn_implementation  # noqa: SLF001 - transformers has no other way to ask
        if not set(getattr(config, "layer_types", None) or ["full_attention"]) <= _KINDS:
            return False
        register()
        alone = self._logits(PROBE_ROWS)
        try:
            model.set_attn_implementation(NAME)
            found = (
                self._logits(PROBE_ROWS),
                self._behind_others(),
                self._behind_a_shared_prompt(),
            )
        except (UnknownAttentionError, TypeError, ValueError, KeyError) as error:
            log.warning("the model keeps its own attention: %s", " ".join(str(error).split()))
            model.set_attn_implementation(own)
            return False
        close = _rounding(alone.dtype, config.num_hidden_layers)
        differs = max(_difference(alone, each) for each in found) if self._probes else 0.0
        if differs > close:
            raise OperatorFault(
                f"learner.packing: the logits of an answer in a row with others differ by {differs:.1%} from those of "
                f"the answer alone, and rounding explains {close:.1%}; false gives each answer its own row"
            )
        return True

    def _check_row_ranks(self) -> None:
        """OperatorFault: ranks cannot share the rows of this model."""
        config, count = self.model.config.get_text_config(), self._row_ranks.size
        rope = str(getattr(config, "rope_parameters", None))
        if not self.packed:
            expected = "1, because packing is off (learner.packing, or the model's own attention)"
        elif config.num_attention_heads % count:
            expected = f"a divisor of the model's {config.num_attention_heads} attention heads"
        elif "dynamic" in rope or "longrope" in rope:
            expected = "1, because the model's rotary frequencies depend on the row's length"
        else:
            return
        raise OperatorFault(f"learner.context_parallel: expected {expected}; found {count}")

    def _behind_others(self) -> Tensor:
        """The last logits of each of PROBE_ROWS in one row."""
        starts = range(0, 3 * len(PROBE_ROWS), 3)
        return self._in_pieces(
            list(chain.from_iterable(PROBE_ROWS)),
            [0, 1, 2] * len(PROBE_ROWS),
            [(s, 3, 0, 0) for s in starts],
        )[2::3]

    def _behind_a_shared_prompt(self) -> Tensor:
        """The same, where the answers to a prompt share its first token. Each has its own copy of the last one."""
        tokens: list[int] = []
        pieces = []
        for one, other in zip(PROBE_ROWS[::2], PROBE_ROWS[1::2], strict=True):
            start = len(tokens)
            pieces += [(start, 1, 0, 0), (start + 1, 2, start, 1), (start + 3, 2, start, 1)]
            tokens += [*one, *other[1:]]
        ends = [start + 1 for start, length, *_ in pieces if length == 2]
        positions = [0, 1, 2, 1, 2] * (len(PROBE_ROWS) // 2)
        return self._in_pieces(tokens, positions, pieces)[ends]

    def _in_pieces(
        self, tokens: list[int], positions: list[int], pieces: list[tuple[int, int, int, int]]
    ) -> Tensor:
        columns = np.array(pieces, dtype=np.int64).T
        context = self._context(np.array([positions]), Pieces(*columns), RowRanks())
        logits_v: Tensor = _run(self.model, [tokens], self._device, **context).logits[0]
        return logits_v

    def _logits(self, rows: list[list[int]]) -> Tensor:
        """The last logits of each row."""
        logits_v: Tensor = _run(self.model, rows, self._device).logits[:, -1]
        return logits_v


def _score(
    model: Any,
    tokens_bt: Tensor,
    places_n: Tensor,
    drawn_n: Tensor,
    temperatures_n: Tensor,
    tail: LogitTail,
    context: dict[str, Any],
) -> TokenScores:
    """A method of the model: the scores of drawn_n, each from the model's output at places_n of all rows."""
    scores: TokenScores = getattr(model.get_output_embeddings(), METHOD)(
        _hidden(model, tokens_bt, places_n, context), drawn_n, temperatures_n, tail
    )
    return scores


def _read(
    model: Any,
    tokens_bt: Tensor,
    places_n: Tensor,
    read: Callable[[Tensor], object],
    tail: LogitTail,
    context: dict[str, Any],
) -> None:
    """A method of the model: see `AnswerScorer.read_logits`."""
    head = model.get_output_embeddings()
    getattr(head, READER)(_hidden(model, tokens_bt, places_n, context), read, tail)


def _hidden(model: Any, tokens_bt: Tensor, places_n: Tensor, context: dict[str, Any]) -> Tensor:
    """The hidden states below the head at places_n of all rows [n, h]."""
    found = model.base_model(input_ids=tokens_bt, use_cache=False, **context)
    hidden_nh: Tensor = found.last_hidden_state.flatten(0, 1).index_select(0, places_n)
    return hidden_nh


def _apply_head(
    head: Any, hidden_nh: Tensor, drawn_n: Tensor, temperatures_n: Tensor, tail: LogitTail
) -> TokenScores:
    """A method of the head: the scores of drawn_n, each from the hidden state of its row."""
    bias_v = getattr(head, "bias", None)
    return token_scores(hidden_nh, head.weight, bias_v, drawn_n, temperatures_n, tail)


def _read_head(
    head: Any, hidden_nh: Tensor, read: Callable[[Tensor], object], tail: LogitTail
) -> None:
    """A method of the head: call `read` with the logits of a few hidden states at a time."""
    for logits_nv in whole_logits(hidden_nh, head.weight, getattr(head, "bias", None), tail):
        read(logits_nv)


def _tail(model: Any, device: torch.device) -> LogitTail:
    """How the model changes the output of its head. One run replaces this output by known values, which are then
    compared with the model's logits.

    OperatorFault: the change is not known here.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise OperatorFault(f"learner.model: {type(model).__name__} has no head over a vocabulary")
    if model.base_model is model:
        raise OperatorFault(
            f"learner.model: {type(model).__name__} does not return the hidden states below its head, and the learner "
            "needs them; SGLang can serve it, and another trainer can train it (echo2d.client)"
        )
    asked: list[Tensor] = []

    def replace(_: object, __: object, output: Tensor) -> Tensor:
        ramp = torch.linspace(-30.0, 30.0, output.shape[-1], device=output.device)
        asked.append(ramp)
        return ramp.to(output.dtype).expand_as(output)

    handle = head.register_forward_hook(replace)
    try:
        answer_v = _run(model, [[3]], device).logits[0, -1]
    finally:
        handle.remove()
    (ramp_v,) = asked
    config = model.config.get_text_config()
    named = {name: getattr(config, name, None) or 0.0 for name in ("logits_scaling", "logit_scale")}
    scales = [1.0, *(each for scale in named.values() if scale for each in (scale, 1 / scale))]
    cap = getattr(config, "final_logit_softcapping", None) or 0.0
    for tail in (LogitTail(cap=float(cap)), *(LogitTail(scale=float(scale)) for scale in scales)):
        if _close(answer_v, tail.bend_(ramp_v.clone())):
            return tail
    raise OperatorFault(
        f"learner.model: {type(model).__name__} changes its logits in a way that is not known here"
    )


def _run(model: Any, tokens: list[list[int]], device: torch.device, **context: Any) -> Any:
    """The model's own output, without gradient and dropout."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(input_ids=torch.tensor(tokens, device=device), use_cache=False, **context)
    finally:
        # Some models raise above, and are trained nevertheless, with their own attention.
        model.train(was_training)


def _close(found_v: Tensor, expected_v: Tensor) -> bool:
    """Whether both are equal up to the rounding of found_v's dtype."""
    return _difference(found_v[None], expected_v[None]) <= _rounding(found_v.dtype, 1)


def _rounding(dtype: torch.dtype, layers: int) -> float:
    """How far logits [v] may differ, relative to the largest, in a model of so many layers."""
    if dtype == torch.float32:
        return 1e-4
    # The roundings of layers add up like steps at random; those of 24 layers in 16 bits make about 2e-2.
    return 3e-2 * max(1.0, math.sqrt(layers / 24))


def _difference(found_bv: Tensor, expected_bv: Tensor) -> float:
    """How far the middle row's logits differ, relative to the largest."""
    found_bv, expected_bv = found_bv.float(), expected_bv.float()
    largest_b = expected_bv.abs().amax(dim=1).clamp_min(1.0)
    return float(((found_bv - expected_bv).abs().amax(dim=1) / largest_b).quantile(0.5))
