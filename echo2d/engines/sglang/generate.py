"""One sample asked of SGLang's `/generate`, and what its chunks say. Pure.

SGLang names the versions that wrote a request's tokens only in the last chunk (`weight_versions`); the chunks before it
carry a label that its HTTP process made up when it passed them on. A request that ends in the queue repeats its last
token, alone or behind others.
"""

from collections.abc import Mapping
from typing import Any

from echo2d.engines.base import EngineSpan, FinishReason
from echo2d.engines.server.calls import GenerationCall, SampleState
from echo2d.engines.server.continuation import StreamChunk
from echo2d.engines.server.http_client import error_text
from echo2d.errors import EngineFault

_FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def request_body(rid: str, label: str, call: GenerationCall, sample: SampleState) -> dict[str, Any]:
    request = call.request
    return {
        "rid": rid,
        "input_ids": [*request.prompt, *sample.output],
        "sampling_params": {
            "max_new_tokens": sample.room,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": -1,
            "stop_token_ids": sorted(sample.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": ((call.seed + sample.index) * 1_000_003 + len(sample.output) * 7919)
            & 0x7FFFFFFF,
        },
        "return_logprob": True,
        "cache_salt": label,
        "stream": True,
        "no_logs": True,
    }


def read_chunk(chunk: Mapping[str, Any]) -> StreamChunk:
    """EngineFault: it is no output, or SGLang gave the request up."""
    try:
        return _read_chunk(chunk)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineFault(
            f"SGLang streamed what is no output: {type(error).__name__} {error}"
        ) from error


def _read_chunk(chunk: Mapping[str, Any]) -> StreamChunk:
    if "error" in chunk:
        raise EngineFault(f"SGLang ended a request: {error_text(chunk)}")
    meta, ids = chunk["meta_info"], chunk["output_ids"]
    entries = meta.get("output_token_logprobs") or []
    consistent = len(entries) == len(ids) and all(
        entry[1] == each for entry, each in zip(entries, ids, strict=True)
    )
    spans = meta.get("weight_versions")
    return StreamChunk(
        [(int(entry[1]), float(entry[0])) for entry in entries] if consistent else None,
        int(meta.get("completion_tokens", len(ids))),
        _finish(meta.get("finish_reason")),
        str(meta["weight_version"]) if "weight_version" in meta else None,
        None
        if spans is None
        else [
            EngineSpan(int(span["start"]), int(span["end"]), str(span["version"])) for span in spans
        ],
        int(meta.get("cached_tokens") or 0),
    )


def _finish(reason: Mapping[str, Any] | None) -> FinishReason | None:
    if reason is None:
        return None
    if reason["type"] == "abort" and (reason.get("status_code") or 0) >= 400:
        raise EngineFault(f"SGLang gave a request up: {error_text(reason.get('message'))}")
    return _FINISHES[reason["type"]]
