"""What the official client is told about a prompt, and about samples. The environment of `make nightly-tinker` runs it:

python -m tests.support.tinker_prompts URL BASE_MODEL             TINKER_API_KEY has its key; prints one JSON object
python -m tests.support.tinker_prompts URL BASE_MODEL --told      reads words, and answers each with a line of JSON:
    train     a gradient is asked for; the answer comes at once
    ask       what is said of a prompt under the base model
"""

import json
import sys
from typing import Any

import tinker
import torch
from tinker import types

TOKENS = [5, 61, 7, 300, 7, 42, 5, 61, 9, 11, 250, 3]
TOP, ALTERNATIVES, LAST = 20, 3, 5
# Rows of tokens in place of those from the second one on.
TARGETS = {0: [300, 5], 4: [42], 10: [3, 0, 511]}


def target_tokens() -> torch.Tensor:
    made = torch.full((len(TOKENS) - 1, 3), -1, dtype=torch.int64)
    for row, tokens in TARGETS.items():
        made[row, : len(tokens)] = torch.tensor(tokens)
    return made


def ask(sampler: tinker.SamplingClient) -> dict[str, Any]:
    prompt, once = types.ModelInput.from_ints(TOKENS), types.SamplingParams(max_tokens=1, seed=1)
    whole = sampler.sample(
        prompt,
        1,
        once,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=TOP,
        target_prompt_logprobs=types.TensorData.from_torch_sparse(target_tokens(), pad_value=-1),
        prompt_alt_tokens_k=ALTERNATIVES,
    ).result()
    part = sampler.sample(
        prompt,
        1,
        once,
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=LAST,
        topk_prompt_logprobs=TOP,
        target_prompt_logprobs=types.TensorData.from_torch(target_tokens()),
    ).result()
    assert whole.target_prompt_logprobs is not None
    assert part.target_prompt_logprobs is not None
    assert whole.prompt_alt_tokens is not None
    assert len(whole.sequences[0].tokens) == 1
    return {
        "logprobs": whole.prompt_logprobs,
        "top": whole.topk_prompt_logprobs,
        "targets": whole.target_prompt_logprobs.tolist(),
        "alternatives": whole.prompt_alt_tokens.tokens.tolist(),
        "alternative_logprobs": whole.prompt_alt_tokens.logprobs.tolist(),
        "last_logprobs": part.prompt_logprobs,
        "last_top": part.topk_prompt_logprobs,
        "dense_targets": part.target_prompt_logprobs.tolist(),
        "compute_logprobs": sampler.compute_logprobs(prompt).result(),
    }


def draw(sampler: tinker.SamplingClient, temperature: float) -> dict[str, Any]:
    how = types.SamplingParams(max_tokens=6, seed=1, temperature=temperature, stop=[])
    prompt = types.ModelInput.from_ints(TOKENS)
    found = sampler.sample(
        prompt, 3, how, include_prompt_logprobs=True, topk_sample_logprobs=TOP
    ).result()
    return {
        "temperature": temperature,
        "prompt": found.prompt_logprobs,
        "tokens": [each.tokens for each in found.sequences],
        "logprobs": [each.logprobs for each in found.sequences],
        "top": [each.topk_logprobs for each in found.sequences],
    }


def main(base_url: str, base_model: str) -> None:
    service = tinker.ServiceClient(base_url=base_url)
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)
    inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    training.forward_backward([datum], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.02)).result()
    sampler = training.save_weights_and_get_sampling_client()
    trained = ask(sampler) | {"drawn": draw(sampler, 0.25)}
    # The trainer's own logprobs of the most likely tokens.
    tokens = torch.tensor([[token for token, _ in row] for row in trained["top"][1:]])
    wide = types.Datum(
        model_input=datum.model_input,
        loss_fn_inputs={"target_tokens": tokens, "weights": torch.ones(tokens.shape)},
    )
    (output,) = training.forward([wide], "cross_entropy").result().loss_fn_outputs
    trained["trainer"] = output["logprobs"].tolist()
    sampler = service.create_sampling_client(base_model=base_model)
    base = ask(sampler) | {"drawn": draw(sampler, 0.5), "greedy": draw(sampler, 0.0)}
    json.dump({"trained": trained, "base": base}, sys.stdout)


def serve(base_url: str, base_model: str) -> None:
    service = tinker.ServiceClient(base_url=base_url)
    training = service.create_lora_training_client(base_model=base_model, rank=8, seed=1)
    sampler = service.create_sampling_client(base_model=base_model)
    inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)
    for word in map(str.strip, sys.stdin):
        if word == "train":
            training.forward_backward([datum], "cross_entropy")
        sys.stdout.write(json.dumps(ask(sampler) if word == "ask" else None) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    (serve if sys.argv[3:] == ["--told"] else main)(*sys.argv[1:3])
