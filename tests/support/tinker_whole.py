"""A client that trains full weights, beside one that trains an adapter. The environment of `make nightly-tinker` runs:

python -m tests.support.tinker_whole URL BASE_MODEL KEY OTHER_KEY     prints one JSON object
"""

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tinker
from tinker import types

from tests.support.tinker_samples import PROMPT, Drawn, datum, draw

STEPS, ROWS, ROW_TOKENS, TURNS = 6, 8, 24, 3
RATE = 5e-3


class Client:
    """rank: of its model; 0: full weights."""

    def __init__(self, base_url: str, base_model: str, key: str, rank: int) -> None:
        self.service = tinker.ServiceClient(base_url=base_url, api_key=key)
        self._base = base_model
        self.training = self.service.create_lora_training_client(
            base_model=base_model, rank=rank, seed=1
        ).result()

    def step(self, rows: random.Random) -> float:
        """A step as sl_loop makes it; returns the mean of -log p before it."""
        data = [datum([rows.randrange(5, 60) for _ in range(ROW_TOKENS)]) for _ in range(ROWS)]
        done = self.training.forward_backward(data, "cross_entropy")
        stepped = self.training.optim_step(types.AdamParams(learning_rate=RATE))
        loss = done.result().metrics["loss:sum"]
        stepped.result()
        return float(loss) / (ROWS * (ROW_TOKENS - 1))

    def scored(self, drawn: Drawn) -> Drawn:
        """The same, each with the logprobs of its tokens by the trainer."""
        data = [datum([*PROMPT, *each["tokens"]]) for each in drawn]
        found = self.training.forward(data, "cross_entropy").result().loss_fn_outputs
        own = [each["logprobs"].tolist()[len(PROMPT) - 1 :] for each in found]
        return [{**each, "trainer": one} for each, one in zip(drawn, own, strict=True)]


def rescored(sampler: tinker.SamplingClient, drawn: Drawn) -> Drawn:
    """The same, each with the logprobs of its tokens by the learner under the sampler's weights."""
    inputs = [types.ModelInput.from_ints([*PROMPT, *each["tokens"]]) for each in drawn]
    asked = [sampler.compute_logprobs(each) for each in inputs]
    found = [each.result()[len(PROMPT) :] for each in asked]
    return [{**each, "learner": one} for each, one in zip(drawn, found, strict=True)]


def sample_turns(client: Client) -> list[Drawn]:
    """What a client draws in a few turns from one sampler, while another one does so too."""
    sampler = client.training.save_weights_and_get_sampling_client().result()
    return [client.scored(draw(sampler)) for _ in range(TURNS)]


def main(base_url: str, base_model: str, key: str, other_key: str) -> None:
    whole, adapter = (
        Client(base_url, base_model, key, 0),
        Client(base_url, base_model, other_key, 8),
    )
    info = whole.training.get_info()
    told: dict[str, Any] = {"is_lora": info.is_lora, "rank": info.lora_rank}
    try:
        Client(base_url, base_model, other_key, 0)
    except tinker.RequestFailedError as refused:
        told["second"] = str(refused)
    rows = random.Random(7)
    told["losses"] = [whole.step(rows) for _ in range(STEPS)]
    adapter.step(random.Random(8))
    sampler = whole.training.save_weights_and_get_sampling_client().result()
    told["drawn"] = rescored(sampler, whole.scored(draw(sampler)))
    # Two clients at the same time: their weights take turns.
    began_at = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(sample_turns, (whole, adapter))
        told["whole"], told["adapter"] = found
    told["turns_s"] = time.monotonic() - began_at
    base = whole.service.create_sampling_client(base_model=base_model).result()
    told["base"] = draw(base)
    # The first sampler's weights again, although the model has gone on.
    whole.step(rows)
    told["again"] = rescored(sampler, draw(sampler))
    path = whole.training.save_state("state").result().path
    weights = whole.training.save_weights_for_sampler("final").result().path
    told["next"] = whole.step(rows)
    whole.service.close("completed")
    again = tinker.ServiceClient(base_url=base_url, api_key=key)
    whole.training = again.create_training_client_from_state_with_optimizer(path).result()
    rows = random.Random(7)
    for _ in range(STEPS + 1):
        [rows.randrange(5, 60) for _ in range(ROWS * ROW_TOKENS)]
    told["resumed"] = whole.step(rows)
    told["final"] = rescored(
        final := again.create_sampling_client(model_path=weights).result(), draw(final)
    )
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
