"""The embedded default engine: any Hugging Face causal LM with attention layers, through transformers, on CPU or GPU.

    engine.py    TorchEngine, the event loop's side: requests in, deltas out
    decoder.py   the thread that owns the model: admit, step, retire, swap weights between two tokens
    batch.py     the KV of running sequences as one left-padded batch
    sampling.py  logits -> tokens and their exact logprobs
    policy.py    snapshot directory -> model on its device, and its tensors back out of its memory
    lora.py      an adapter beside a model's weights

Importing this package imports torch and transformers.
"""

from echo2d.engines.torch_engine.engine import TorchEngine, devices_of

__all__ = ["TorchEngine", "devices_of"]
