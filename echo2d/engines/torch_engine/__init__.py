"""The default engine. It runs in the worker's process, on CPU or GPU, through transformers.

It serves any Hugging Face causal LM whose layers keep their past in an attention cache.

    engine.py        TorchEngine, on the event loop: takes requests, streams deltas
    decoder.py       the thread that owns the model: admit, step, retire, swap weights between tokens
    batch.py         the KV cache of running sequences as one left-padded batch
    sampling.py      logits -> tokens and their exact logprobs
    scoring.py       how likely another engine's answer is, and whether its seed gives it
    answer_score.py  answers of the coordinator -> forward passes -> evidence
    gumbel.py        the draws of an SGLang server, for scoring
    int8.py          linear layers in int8
    policy.py        snapshot directory -> model on its device, a LoRA adapter beside its weights, and
                     tensors read back from its memory

Importing this package imports torch and transformers.
"""

from echo2d.engines.torch_engine.engine import TorchEngine, devices_of

__all__ = ["TorchEngine", "devices_of"]
