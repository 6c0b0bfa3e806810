"""Builds the body of a vLLM request for one sample and reads its chunks. Pure.

Only the last chunk names the versions that wrote a request's tokens. vLLM knows nothing of a sample's earlier pieces,
and draws from the beginning of a seed's random numbers in each request. So each piece gets a seed of its own.
"""

from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from echo2d.core.worker.events import LabelSpan
from echo2d.engines.base import FinishReason
from echo2d.engines.server.calls import GenerationCall, SampleState
from echo2d.engines.server.continuation import StreamChunk
from echo2d.engines.server.http_client import error_text
from echo2d.errors import EngineFault

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def request_body(
    rid: str, salt: str, adapter: str | None, call: GenerationCall, sample: SampleState
) -> dict[str, Any]:
    """Build the request for the next piece of a sample: it continues from the output so far.

    salt: only requests with the same salt share cached prefixes. adapter: None: the base alone.
    """
    request, sampling = call.request, call.request.sampling
    return {
        "request_id": rid,
        "model": adapter,
        "token_ids": [*request.prompt, *sample.output],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "cache_salt": salt,
        "sampling_params": {
            "max_tokens": sample.room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": piece_seed(sample.seed, len(sample.output)),
            "stop_token_ids": sorted(sample.stop),
            # Else the end tokens of the model's generation_config.json would end it, too.
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        },
    }


def piece_seed(seed: int, written: int) -> int:
    """The seed of the piece that begins after `written` tokens, at most 2^63 - 1."""
    digest = blake3(f"{seed} {written}".encode()).digest(8)
    return int.from_bytes(digest, "little") >> 1


def read_chunk(chunk: Mapping[str, Any], _: Mapping[str, object]) -> StreamChunk:
    """Read one chunk. EngineFault: it is malformed, or vLLM gave the request up."""
    try:
        return _read_chunk(chunk)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise EngineFault(
            f"vLLM streamed a malformed chunk: {type(error).__name__} {error}"
        ) from error


def _read_chunk(chunk: Mapping[str, Any]) -> StreamChunk:
    if "error" in chunk:
        raise EngineFault(f"vLLM ended a request: {error_text(chunk)}")
    choice, end = chunk["choices"][0], int(chunk["usage"]["completion_tokens"])
    ids = choice["token_ids"]
    entries = (choice.get("logprobs") or {}).get("content") or []
    consistent = len(entries) == len(ids) and all(
        entry["token_id"] == each for entry, each in zip(entries, ids, strict=True)
    )
    spans = choice.get("weight_versions")
    reason = choice["finish_reason"]
    return StreamChunk(
        [(int(entry["token_id"]), float(entry["logprob"])) for entry in entries]
        if consistent
        else None,
        end,
        None if reason is None else _FINISHES[reason],
        None,
        None
        if spans is None
        else [
            LabelSpan(int(span["start"]), int(span["end"]), str(span["version"])) for span in spans
        ],
    )
