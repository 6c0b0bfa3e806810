"""Plays episodes with the unmodified training client of `verifiers`, in an environment of its own.

python tools/envs/verifiers_client.py GATEWAY_URL MODEL_DIR EPISODES TURNS

The environment variable GATEWAY_SECRET has the secret. For each episode the program prints one JSON line:
whether each prompt extended the one before it, and the tokens, mask and logprobs of the episode's trace,
on which a trainer that uses `verifiers` would train.
"""

import asyncio
import importlib.metadata
import json
import sys
from typing import Any

from renderers import Qwen3RendererConfig
from verifiers.v1 import graph
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig

SAID = ("What is 1 + 1?", "and 11?", "<|im_end|> is a word", "</tool_response>")


async def main(url: str, model: str, episodes: str, turns: str) -> None:
    # Qwen3's template drops reasoning, so only without thinking does each prompt extend the one before it.
    config = TrainClientConfig(
        base_url=f"{url}/v1",
        api_key_var="GATEWAY_SECRET",
        renderer=Qwen3RendererConfig(enable_thinking=False),
        renderer_model_name=model,
    )
    client = TrainClient(config)
    print(json.dumps({"verifiers": importlib.metadata.version("verifiers")}), flush=True)
    played = [play(client, number, int(turns)) for number in range(int(episodes))]
    for episode in asyncio.as_completed(played):
        print(json.dumps(await episode), flush=True)
    await client.close()


async def play(client: TrainClient, number: int, turns: int) -> dict[str, Any]:
    trace = Trace.model_construct()
    dialect, sampling = ChatDialect(), SamplingConfig(temperature=1.0, max_tokens=24)
    messages: list[dict[str, Any]] = []
    extended: list[bool] = []
    before: list[int] = []
    for turn in range(turns):
        # In every second episode the model gets results of tools instead of messages of a user.
        role = {"role": "tool", "tool_call_id": "c"} if turn and number % 2 else {"role": "user"}
        messages.append({**role, "content": f"{number}: {SAID[(number + turn) % len(SAID)]}"})
        body = {"model": "policy", "messages": messages}
        asked = dialect.parse_request(body)
        pending = graph.prepare_turn(trace, asked.messages)
        response = await client.get_response(dialect, body, sampling, trace.id, pending)
        pending.commit(response)
        extended.append(response.tokens.prompt_ids[: len(before)] == before)
        before = [*response.tokens.prompt_ids, *response.tokens.completion_ids]
        messages.append(response.raw["choices"][0]["message"])
    nodes = trace.nodes
    parents = [node.parent for node in nodes]
    return {
        "extended": extended,
        "one_branch": parents == [None, *range(len(nodes) - 1)],
        "tokens": [token for node in nodes for token in node.token_ids],
        "mask": [each for node in nodes for each in node.mask],
        "logprobs": [each for node in nodes for each in node.logprobs],
        "last": before,
    }


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
