"""Calls each part of the official client once. The environment of `make nightly-tinker` runs it:

python -m tests.support.tinker_tour URL BASE_MODEL     TINKER_API_KEY has its key

It prints a line for each step: `NAME: done`, or `NAME: failed` and why. A step needs those before it.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import tinker
import torch
from tinker import types

TOKENS = [5, 61, 7, 300, 7, 42, 5, 61, 9, 11, 250, 3]
PROMPT = types.ModelInput.from_ints(TOKENS)
SHORT = types.SamplingParams(max_tokens=4, seed=1, temperature=0.7, top_p=0.9, top_k=9, stop=["x"])


def datum(**inputs: Any) -> types.Datum:
    given = {"target_tokens": TOKENS[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=given)


def squares(_: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    loss = torch.stack([(each**2).sum() for each in logprobs]).sum()
    return loss, {"loss": float(loss.detach())}


class Tour:
    """A session that goes through the API. Each method is a step."""

    def __init__(self, base_url: str, base_model: str) -> None:
        self.model = base_model
        self.service = tinker.ServiceClient(base_url=base_url, user_metadata={"of": "tour"})
        self.rest = tinker.RestClient(base_url=base_url)

    def steps(self) -> Iterator[Callable[[], None]]:
        yield self.create
        yield self.train
        yield self.save
        yield self.load
        yield self.sample
        yield self.logprobs
        yield self.reinforce
        yield self.list
        yield self.close

    def create(self) -> None:
        self.training = self.service.create_lora_training_client(
            base_model=self.model, rank=8, seed=1, user_metadata={"of": "tour"}
        ).result()
        self.training.get_info()

    def train(self) -> None:
        ones = [1.0] * (len(TOKENS) - 1)
        wide = torch.tensor([[token, 0, 0, 0] for token in TOKENS[1:]])
        rows = [datum(weights=ones), datum(target_tokens=wide, weights=(wide > 0).float())]
        self.training.forward(rows, "cross_entropy").result()
        self.training.forward_backward(rows, "cross_entropy").result()
        self.training.forward_backward_custom([datum(weights=ones)], squares).result()
        adam = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0, weight_decay=0.01)
        self.training.optim_step(adam).result()

    def save(self) -> None:
        self.state = self.training.save_state("one", ttl_seconds=3600).result().path
        named = self.training.save_weights_for_sampler("one", ttl_seconds=3600)
        self.weights = named.result().path
        self.sampler = self.training.save_weights_and_get_sampling_client().result()

    def load(self) -> None:
        self.service.create_training_client_from_state(self.state).result()
        again = self.service.create_training_client_from_state_with_optimizer(self.state)
        again.result().optim_step(types.AdamParams()).result()

    def sample(self) -> None:
        base = self.service.create_sampling_client(base_model=self.model)
        named = self.service.create_sampling_client(model_path=self.weights)
        for made in (base, named):
            made.result().sample(PROMPT, 1, SHORT).result()
        self.sampled = self.sampler.sample(PROMPT, 2, SHORT).result()

    def logprobs(self) -> None:
        self.sampler.compute_logprobs(PROMPT).result()
        targets = types.TensorData.from_torch(torch.tensor([[token] for token in TOKENS[1:]]))
        self.sampler.sample(
            PROMPT, 1, SHORT, include_prompt_logprobs=True, prompt_logprobs_last_n=3, topk_prompt_logprobs=2,
            target_prompt_logprobs=targets, prompt_alt_tokens_k=2,
        ).result()  # fmt: skip

    def reinforce(self) -> None:
        """On a sample, which the row says it comes from."""
        (drawn, _) = self.sampled.sequences
        count, before = len(drawn.tokens), len(TOKENS) - 1
        tokens = [*TOKENS, *drawn.tokens]
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + drawn.logprobs,
            "advantages": [0.0] * before + [1.0] * count,
        }
        row = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
        )
        prompt = types.PromptProvenanceSpan(
            sequence_id=drawn.sequence_id, offset=0, length=len(TOKENS)
        )
        rest = types.PromptProvenanceSpan(sequence_id=drawn.sequence_id, offset=1, length=before)
        spans = [
            types.SampledProvenanceSpan(sequence_id=drawn.sequence_id, offset=0, length=length)
            for length in (count - 1, count)
        ]
        row = row.with_provenance(model_input=[prompt, spans[0]], loss_fn_inputs=[rest, spans[1]])
        self.training.forward_backward([row], "stable_reinforce").result()
        clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
        self.training.forward_backward([row], "ppo", clip).result()
        self.training.optim_step(types.AdamParams()).result()

    def list(self) -> None:
        self.rest.get_server_capabilities().result()
        self.rest.list_training_runs().result()
        self.rest.get_training_run_by_tinker_path(self.state).result()
        self.rest.list_checkpoints(self.training.model_id).result()
        self.rest.list_user_checkpoints().result()
        self.rest.get_weights_info_by_tinker_path(self.state).result()
        self.rest.set_checkpoint_ttl_from_tinker_path(self.state, 7200).result()
        self.rest.delete_checkpoint_from_tinker_path(self.state).result()

    def close(self) -> None:
        self.service.close("success").result()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(base_url: str, base_model: str) -> None:
    for step in Tour(base_url, base_model).steps():
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the steps behind it are tried, too
            said = " ".join(f"{type(error).__name__}: {error}".split())
            say(f"{step.__name__}: failed: {said[:300]}")
        else:
            say(f"{step.__name__}: done")


if __name__ == "__main__":
    main(*sys.argv[1:])
