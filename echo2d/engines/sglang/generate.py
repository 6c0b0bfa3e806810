"""Builds the body of an SGLang `/generate` request for one sample and reads its chunks. Pure.

Only the last chunk names the versions that wrote a request's tokens (`weight_versions`). Earlier chunks carry
the label that SGLang's HTTP process held when it forwarded them, which does not prove which version wrote their
tokens (I2). A request that ends in SGLang's queue repeats its last token, alone or after others.
"""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from echo2d.core.base.model_config import ExpertNumbers, expert_numbers
from echo2d.core.protocol.columns import Columns
from echo2d.core.protocol.experts import EXPERTS, column_of
from echo2d.core.protocol.seeds import SGLANG_SEED_MASK
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

    salt: only requests with the same salt share cached prefixes.
    """
    request, sampling = call.request, call.request.sampling
    before = [*request.prompt, *sample.output]
    return {
        "rid": rid,
        "input_ids": before,
        "sampling_params": {
            "max_new_tokens": sample.room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop_token_ids": sorted(sample.stop),
            "no_stop_trim": True,
            "skip_special_tokens": False,
            # Only a server with --enable-deterministic-inference uses it. The server draws each token by the
            # seed and by the number of all tokens before it, including the prompt's. So all pieces of a sample
            # and all its attempts have one seed (see torch_engine/gumbel.py).
            "sampling_seed": sample.seed & SGLANG_SEED_MASK,
        },
        "return_logprob": True,
        "cache_salt": salt,
        "stream": True,
        "no_logs": True,
        **({"lora_path": adapter} if adapter else {}),
        # The experts of the token before each output token, which drew it.
        **(
            {"return_routed_experts": True, "routed_experts_start_len": len(before) - 1}
            if EXPERTS in request.columns
            else {}
        ),
    }


def read_chunk(chunk: Mapping[str, Any], config: Mapping[str, object]) -> StreamChunk:
    """Read one chunk. config: of the model.

    EngineFault: it is malformed, or SGLang gave the request up.
    """
    try:
        return _read_chunk(chunk, expert_numbers(config))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineFault(
            f"SGLang streamed a malformed chunk: {type(error).__name__} {error}"
        ) from error


def _read_chunk(chunk: Mapping[str, Any], experts: ExpertNumbers | None) -> StreamChunk:
    if "error" in chunk:
        raise EngineFault(f"SGLang ended a request: {error_text(chunk)}")
    meta, ids = chunk["meta_info"], chunk["output_ids"]
    entries = meta.get("output_token_logprobs") or []
    # Tokens are reported twice, with and without logprobs. If the two lists differ, the tokens of this
    # chunk are unknown (None), which is not the same as no tokens.
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
            LabelSpan(int(span["start"]), int(span["end"]), str(span["version"])) for span in spans
        ],
        int(meta.get("cached_tokens") or 0),
        _columns(meta.get("routed_experts"), experts),
    )


def _columns(routed: str | None, numbers: ExpertNumbers | None) -> Columns:
    """The column of experts, of which SGLang tells those of every layer, in base64 of int32."""
    if not routed or numbers is None:
        return ()
    found = np.frombuffer(base64.b64decode(routed), dtype="<i4").reshape(-1, *numbers[:2])
    return (column_of(found, numbers.experts),)


def _finish(reason: Mapping[str, Any] | None) -> FinishReason | None:
    if reason is None:
        return None
    if reason["type"] == "abort" and (reason.get("status_code") or 0) >= 400:
        raise EngineFault(f"SGLang gave a request up: {error_text(reason.get('message'))}")
    return _FINISHES[reason["type"]]
