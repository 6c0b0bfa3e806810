"""Reads the prompts of clients of the Tinker API: a part of one at a time, with a KV cache of its own.

Between two parts the decoder goes on, so a long prompt holds up generation for one part only.
"""

import numpy as np
import torch
from transformers import DynamicCache

from echo2d.engines.torch_engine.policy import InferencePolicy
from echo2d.errors import EngineFault
from echo2d.tinker.prompt_reader import PromptReader
from echo2d.tinker.wire import Malformed, read_prompt_call, write_prompt_scores

# Tokens of a part. Their logits over a vocabulary of 150k are 160 MB in float32; a few such tables exist at a time.
PART_TOKENS = 256


class PromptPass:
    """The passes over one prompt. call: the body of the learner's order "score".

    EngineFault: it is malformed, too long for the model, or has a token that is not in the vocabulary.
    """

    def __init__(self, policy: InferencePolicy, call: bytes) -> None:
        try:
            self._call = read_prompt_call(call)
        except Malformed as wrong:
            raise EngineFault(str(wrong)) from wrong
        tokens_t, vocabulary = self._call.tokens_t, policy.vocab_size
        fault = self._call.fault(vocabulary)
        if not ((tokens_t >= 0) & (tokens_t < vocabulary)).all():
            fault = f"prompt: expected tokens from 0 to {vocabulary - 1}"
        if policy.context_max is not None and len(tokens_t) > policy.context_max:
            fault = f"prompt: expected at most {policy.context_max} tokens; found {len(tokens_t)}"
        if fault:
            raise EngineFault(fault)
        self._reader = PromptReader(self._call, policy.device)
        self._cache, self._read = DynamicCache(), 0
        self._end = int(self._reader.rows_n[-1]) + 1 if len(self._reader.rows_n) else 0

    @property
    def over(self) -> bool:
        return self._read >= self._end

    def step(self, policy: InferencePolicy, label: str) -> None:
        """Read the next part under the version of this label. EngineFault: the memory is too small."""
        start, rows_n = self._read, self._reader.rows_n
        self._read = min(self._end, start + PART_TOKENS)
        own_n = rows_n[slice(*np.searchsorted(rows_n, (start, self._read)))]
        last = self._read - own_n[0] if len(own_n) else 1
        part_t = torch.from_numpy(self._call.tokens_t[start : self._read]).to(policy.device)
        try:
            logits_tv = policy.more_logits(part_t[None], self._cache, label, int(last))
            if len(own_n):
                places_n = torch.from_numpy(own_n - own_n[0]).to(policy.device)
                self._reader.read(logits_tv[places_n].float())
        except RuntimeError as error:
            # Usually memory ran out. On a CPU torch has no exception class for that.
            reason = str(error).partition("\n")[0][:200]
            raise EngineFault(f"{self._end} tokens are not read: {reason}") from error

    def scores(self) -> bytes:
        """What the client is told, once the pass is over: a part of the result of asample."""
        return write_prompt_scores(self._call, self._reader.scores)
