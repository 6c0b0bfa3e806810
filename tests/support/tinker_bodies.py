"""Bodies as the official client writes and reads them. The environment of `make nightly-tinker` runs it:

python -m tests.support.tinker_bodies write FOLDER RNG_SEED BODIES    N.body, and N.json, which says what it holds
python -m tests.support.tinker_bodies read FOLDER                     N.result becomes N.found.json
python -m tests.support.tinker_bodies read-samples FOLDER             N.sample becomes N.sample.json
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "stable_reinforce")
WIDTH = 6


def spans(rng: random.Random, length: int) -> list[dict[str, Any]]:
    """Parts of sequences that cover this many tokens."""
    made = []
    while length:
        part = rng.randint(1, length)
        length -= part
        made.append(
            {
                "sequence": f"s:sample:{rng.randint(1, 3)}/{rng.randint(1, 3)}/0",
                "offset": rng.choice([0, rng.randint(0, 9)]),
                "length": part,
                "sampled": rng.random() < 0.5,
            }
        )
    return made


def client_spans(made: list[dict[str, Any]]) -> Any:
    kinds = {True: types.SampledProvenanceSpan, False: types.PromptProvenanceSpan}
    return [
        kinds[each["sampled"]](
            sequence_id=each["sequence"], offset=each["offset"], length=each["length"]
        )
        for each in made
    ]


def numbers(rng: random.Random, length: int, *, whole: bool, wide: bool) -> torch.Tensor:
    """[length], or [length, WIDTH] with zeros, more of which the client leaves out."""
    zeros = rng.choice([0.0, 0.5, 0.9]) if wide else 0.0
    flat = [
        0 if rng.random() < zeros else rng.randint(0, 2**40) if whole else rng.uniform(-9, 9)
        for _ in range(length * WIDTH if wide else length)
    ]
    made = torch.tensor(flat, dtype=torch.int64 if whole else torch.float32)
    return made.reshape(length, WIDTH) if wide else made


def datum(rng: random.Random) -> tuple[types.Datum, dict[str, Any]]:
    """As the client's object, and what it holds."""
    pieces = [
        [rng.randint(0, 2**31 - 1) for _ in range(rng.randint(1, 9))]
        for _ in range(rng.randint(1, 3))
    ]
    tokens = [token for piece in pieces for token in piece]
    wide = rng.random() < 0.4
    inputs = {
        "target_tokens": numbers(rng, len(tokens), whole=True, wide=wide),
        "weights": numbers(rng, len(tokens), whole=False, wide=wide),
    }
    if not wide:
        inputs["advantages"] = numbers(rng, len(tokens), whole=False, wide=False)
    given: dict[str, Any] = dict(inputs)
    if not wide and rng.random() < 0.5:
        given = {name: rng.choice([each.numpy(), each.tolist()]) for name, each in inputs.items()}
    made = types.Datum(
        model_input=types.ModelInput(
            chunks=[types.EncodedTextChunk(tokens=piece) for piece in pieces]
        ),
        loss_fn_inputs=given,
    )
    origins = spans(rng, len(tokens)) if rng.random() < 0.5 else []
    if origins:
        made = made.with_provenance(
            model_input=client_spans(spans(rng, len(tokens))), loss_fn_inputs=client_spans(origins)
        )
    holds = {name: [str(each.numpy().dtype), each.tolist()] for name, each in inputs.items()}
    sparse = [name for name, each in made.loss_fn_inputs.items() if each.sparse_crow_indices]
    return made, {"tokens": tokens, "inputs": holds, "spans": origins, "sparse": sparse}


def write(folder: Path, rng: random.Random, bodies: int) -> None:
    for index in range(bodies):
        values: list[float | str] = [0.2, 5.0, "text"]
        config = {name: rng.choice(values) for name in rng.sample(["low", "high", "beta"], 2)}
        data = [datum(rng) for _ in range(rng.randint(1, 6))]
        request = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(
                data=[made for made, _ in data],
                loss_fn=rng.choice(LOSSES),
                loss_fn_config=rng.choice([None, config]),
            ),
            model_id=f"{rng.randint(0, 99)}:train:{rng.randint(1, 9)}",
            seq_id=rng.choice([None, rng.randint(1, 2**31 - 1)]),
        )
        message = forward_backward_request_to_proto(request)
        message.forward_only = rng.random() < 0.5
        given = request.forward_backward_input
        holds = {
            "model": request.model_id,
            "number": request.seq_id or 0,
            "loss": given.loss_fn,
            "forward_only": message.forward_only,
            "config": given.loss_fn_config or {},
            "data": [each for _, each in data],
        }
        (folder / f"{index}.body").write_bytes(message.SerializeToString())
        (folder / f"{index}.json").write_text(json.dumps(holds))


def read(folder: Path) -> None:
    for path in folder.glob("*.result"):
        found = deserialize_forward_backward_output(path.read_bytes())
        arrays = [each["logprobs"] for each in found.loss_fn_outputs]
        shown = {
            "kind": found.loss_fn_output_type,
            "metrics": found.metrics,
            "logprobs": [[each.dtype, each.shape, each.data] for each in arrays],
        }
        path.with_suffix(".found.json").write_text(json.dumps(shown))


def read_samples(folder: Path) -> None:
    for path in folder.glob("*.sample"):
        found = deserialize_sample_response(path.read_bytes())
        targets, others = found.target_prompt_logprobs, found.prompt_alt_tokens
        shown = {
            "sampled": found.sequences[0].topk_logprobs,
            "logprobs": found.prompt_logprobs,
            "top": found.topk_prompt_logprobs,
            "targets": targets and [targets.dtype, targets.shape, targets.tolist()],
            "alternatives": others
            and [
                [each.dtype, each.shape, each.tolist()] for each in (others.tokens, others.logprobs)
            ],
        }
        path.with_suffix(".sample.json").write_text(json.dumps(shown))


if __name__ == "__main__":
    what, where, *others = sys.argv[1:]
    if what == "write":
        write(Path(where), random.Random(int(others[0])), int(others[1]))
    elif what == "read":
        read(Path(where))
    else:
        read_samples(Path(where))
