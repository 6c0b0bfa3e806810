"""Holds the KV cache of running sequences as one batch; sequences enter and leave between tokens.

Rows are sequences, in the order of the caller's list. Columns are right-aligned: row r uses the
last `lengths[r]` columns, and attention masks out the padding before them.

    lengths 5, 3, 4      a a a a a
                         . . b b b
                         . c c c c

Between two calls the cache covers every token of every row, `logits` [rows, vocab] and `experts` [rows, layers,
chosen] belong to each row's next token, and there are exactly max(lengths) columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from echo2d.engines.torch_engine.policy import InferencePolicy

# Most padded tokens of one prefill pass. The limit bounds the activations: 200 MB at hidden size 4096.
PREFILL_TOKENS_MAX = 8192

Context = Sequence[int]
_Key = tuple[str, tuple[int, ...]]  # the label of an adapter, and a context


@dataclass(frozen=True, slots=True)
class Prefill:
    """The results of a forward pass of a context."""

    layers: Sequence[tuple[Tensor, Tensor]]  # keys and values [1, heads, tokens, dim]
    logits: Tensor  # [1, vocab], of the next token
    experts: Tensor | None  # [1, layers, chosen], of the next token; None: a dense model
    nbytes: int  # bytes of all these tensors


class DecodeBatch:
    """See the module docstring. `add` appends rows; only `keep` changes the index of a row.

    A batch belongs to one version of the weights, and each of its rows to one adapter beside them.
    """

    def __init__(self, policy: InferencePolicy) -> None:
        self._policy = policy
        self._cache = DynamicCache()
        self._lengths: list[int] = []
        self._adapters: list[str] = []  # the label of each row's adapter; "": it has none
        self._logits: Tensor | None = None
        self.experts: Tensor | None = None
        # Prefills by adapter and context, the newest last. They are kept because most samples of a group arrive
        # one after the other.
        self._kept: dict[_Key, Prefill] = {}

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def logits(self) -> Tensor:
        assert self._logits is not None
        return self._logits

    def add(
        self,
        contexts: Sequence[Context],
        repeats: Sequence[int],
        *,
        adapters: Sequence[str] = (),
        kept_bytes: int = 256 << 20,
    ) -> None:
        """Append repeats[i] rows for contexts[i]. Its KV cache is computed once, or taken from a kept
        prefill.

        adapters: the label of each context's adapter; empty: they have none. kept_bytes: most bytes of prefills that
        are kept for later samples. The default holds 2,000 tokens of a model of 8 B parameters.
        """
        start = 0
        labels = adapters or [""] * len(contexts)
        entries = list(zip(labels, map(tuple, contexts), strict=True))
        for end in _chunk_ends([len(context) for context in contexts]):
            chunk = entries[start:end]
            self._prefill([each for each in dict.fromkeys(chunk) if each not in self._kept])
            self._join(chunk, repeats[start:end])
            self._forget(kept_bytes)
            start = end

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but `rows` (ascending), and the columns that become padding in all rows."""
        if len(rows) == len(self):
            return
        if not rows:
            self._cache, self._lengths, self._logits = DynamicCache(), [], None
            self._adapters, self.experts = [], None
            return
        index = torch.tensor(rows, dtype=torch.int64, device=self._policy.device)
        self._cache.reorder_cache(index)
        self._logits = self.logits[index]
        self.experts = None if self.experts is None else self.experts[index]
        columns = max(self._lengths)
        self._lengths = [self._lengths[row] for row in rows]
        self._adapters = [self._adapters[row] for row in rows]
        self._trim(columns - max(self._lengths))

    def step(self, tokens: Sequence[int]) -> None:
        """Append one token to each row."""
        self._lengths = [length + 1 for length in self._lengths]
        self._logits, self.experts = self._forward(
            self._cache, [[token] for token in tokens], self._lengths, self._adapters
        )

    def check(self) -> None:
        rows, columns = len(self._lengths), max(self._lengths, default=0)
        assert len(self._adapters) == rows
        assert (self._logits is None) == (rows == 0) == (len(self._cache.layers) == 0)
        assert rows == 0 or self.logits.shape[0] == rows
        for layer in self._cache.layers:
            assert layer.keys.shape[0] == layer.values.shape[0] == rows
            assert layer.keys.shape[2] == layer.values.shape[2] == columns

    def _prefill(self, entries: Sequence[_Key]) -> None:
        if not entries:
            return
        contexts = [context for _, context in entries]
        lengths = [len(context) for context in contexts]
        columns = max(lengths)
        cache = DynamicCache()
        padded = [[0] * (columns - len(context)) + list(context) for context in contexts]
        adapters = [adapter for adapter, _ in entries]
        logits, experts = self._forward(cache, padded, lengths, adapters)
        for row, (entry, context) in enumerate(zip(entries, contexts, strict=True)):
            own = (slice(row, row + 1), slice(None), slice(columns - len(context), None))
            # Cloned, because a view would keep the whole pass in memory.
            layers = [
                (layer.keys[own].clone(), layer.values[own].clone()) for layer in cache.layers
            ]
            next_logits = logits[row : row + 1].clone()
            size = next_logits.nbytes + sum(keys.nbytes + values.nbytes for keys, values in layers)
            chosen = None if experts is None else experts[row : row + 1].clone()
            self._kept[entry] = Prefill(layers, next_logits, chosen, size)

    def _join(self, entries: Sequence[_Key], repeats: Sequence[int]) -> None:
        """Append rows for contexts whose prefill is kept, and make these the newest."""
        for entry in entries:
            self._kept[entry] = self._kept.pop(entry)
        entering = [
            self._kept[entry]
            for entry, count in zip(entries, repeats, strict=True)
            for _ in range(count)
        ]
        for number in range(len(entering[0].layers)):
            keys, values = zip(*(each.layers[number] for each in entering), strict=True)
            if self._lengths:
                # Layer by layer, so that the whole cache never exists twice.
                layer = self._cache.layers[number]
                layer.keys = _stack([layer.keys, *keys])
                layer.values = _stack([layer.values, *values])
            else:
                self._cache.update(_stack(keys), _stack(values), number)
        before = [] if self._logits is None else [self._logits]
        self._logits = torch.cat([*before, *(each.logits for each in entering)])
        if chosen := [each.experts for each in entering if each.experts is not None]:
            self.experts = torch.cat([*([] if self.experts is None else [self.experts]), *chosen])
        for (adapter, context), count in zip(entries, repeats, strict=True):
            self._lengths += [len(context)] * count
            self._adapters += [adapter] * count

    def _forget(self, bytes_max: int) -> None:
        size = sum(each.nbytes for each in self._kept.values())
        while size > bytes_max:
            size -= self._kept.pop(next(iter(self._kept))).nbytes

    def _trim(self, columns: int) -> None:
        if columns:
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, columns:], layer.values[:, :, columns:]

    def _forward(
        self,
        cache: DynamicCache,
        tokens: list[list[int]],
        lengths: list[int],
        adapters: Sequence[str],
    ) -> tuple[Tensor, Tensor | None]:
        device = self._policy.device
        ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        return self._policy.next_logits(
            ids, torch.tensor(lengths, dtype=torch.int64, device=device), cache, adapters
        )


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Join caches [rows, heads, columns, dim] by rows; pad the narrower ones on the left."""
    columns = max(part.shape[2] for part in parts)
    return torch.cat([_widen(part, columns) for part in parts])


def _widen(states: Tensor, columns: int) -> Tensor:
    missing = columns - states.shape[2]
    return torch.nn.functional.pad(states, (0, 0, missing, 0)) if missing else states


def _chunk_ends(lengths: Sequence[int]) -> Iterator[int]:
    """Yield the ends of consecutive chunks of rows.

    A chunk has at most PREFILL_TOKENS_MAX padded tokens, or is a single row that is longer.
    """
    start, widest = 0, 0
    for row, length in enumerate(lengths):
        widest = max(widest, length)
        if row > start and widest * (row + 1 - start) > PREFILL_TOKENS_MAX:
            yield row
            start, widest = row, length
    yield len(lengths)
