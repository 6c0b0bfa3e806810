"""What the official client draws from three samplers in turn. The environment of `make nightly-tinker` runs it:

python -m tests.support.tinker_samples URL BASE_MODEL     TINKER_API_KEY has its key; prints one JSON object
"""

import json
import sys
from typing import Any

import tinker
from tinker import types

PROMPT = [5, 61, 7, 300, 7, 42, 5, 61, 9, 11, 250, 3]
COUNT, TOKENS_MAX, RANK = 4, 24, 8
NARROW: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
GREEDY: dict[str, Any] = {"temperature": 0.0}

Drawn = list[dict[str, Any]]


class Trainer:
    """A model, and what it computes of tokens itself."""

    def __init__(self, service: tinker.ServiceClient, base_model: str) -> None:
        self._client = service.create_lora_training_client(base_model=base_model, rank=RANK, seed=1)

    def sampler(self) -> tinker.SamplingClient:
        """Train a step, and open a sampler of its weights."""
        self._client.forward_backward([datum(PROMPT)], "cross_entropy").result()
        self._client.optim_step(types.AdamParams(learning_rate=0.01)).result()
        return self._client.save_weights_and_get_sampling_client()

    def scored(self, drawn: Drawn) -> Drawn:
        """The same, each with the logprobs of its tokens by the weights as they are now."""
        data = [datum([*PROMPT, *each["tokens"]]) for each in drawn]
        found = self._client.forward(data, "cross_entropy").result().loss_fn_outputs
        own = [each["logprobs"].tolist()[len(PROMPT) - 1 :] for each in found]
        return [{**each, "trainer": one} for each, one in zip(drawn, own, strict=True)]


def datum(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def draw(sampler: tinker.SamplingClient, count: int = COUNT, **settings: Any) -> Drawn:
    sampling = types.SamplingParams(**{"max_tokens": TOKENS_MAX, "seed": 7, **settings})
    found = sampler.sample(types.ModelInput.from_ints(PROMPT), count, sampling).result()
    return [
        {"tokens": each.tokens, "logprobs": each.logprobs, "stop": each.stop_reason}
        for each in found.sequences
    ]


def main(base_url: str, base_model: str) -> None:
    service = tinker.ServiceClient(base_url=base_url)
    base = service.create_sampling_client(base_model=base_model)
    told: dict[str, Any] = {"base": draw(base)}
    trainer = Trainer(service, base_model)
    # Its adapter adds nothing yet.
    told["base"] = trainer.scored(told["base"])
    first = trainer.sampler()
    told["first"] = trainer.scored(draw(first))
    told["greedy"] = trainer.scored(draw(first, 1, **GREEDY))
    told["narrow"] = draw(first, **NARROW)
    second = trainer.sampler()
    told["second"] = trainer.scored(draw(second))
    told["compute_logprobs"] = second.compute_logprobs(types.ModelInput.from_ints(PROMPT)).result()
    # The older weights again, under another version.
    told["greedy again"] = draw(first, 1, **GREEDY)
    told["stopped"] = draw(first, 1, **GREEDY, stop=[told["greedy"][0]["tokens"][0]])
    told["first again"] = draw(first)
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
