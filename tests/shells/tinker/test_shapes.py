"""What differs between the requests of two releases of the Tinker API's client is named."""

import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from echo2d.net.tinker.routes import PREFIX
from echo2d.tinker import messages_pb2 as pb
from tests.support.paths import REPO
from tests.support.tinker_shapes import Recorder, Shape, body_fields, changes

RECORDED = REPO / "tests" / "nightly" / "tinker" / "shapes.json"
SAMPLE, DATA = f"POST {PREFIX}/asample", f"POST {PREFIX}/forward_backward"
JSON, PROTOBUF = "application/json", "application/x-protobuf"


def recorded() -> Shape:
    found: Shape = json.loads(RECORDED.read_text())
    return found


def fields(content_type: str, body: bytes) -> dict[str, list[str]]:
    return {name: sorted(types) for name, types in body_fields(content_type, body).items()}


def test_the_same_requests_differ_in_nothing() -> None:
    assert changes(recorded(), recorded()) == []


def test_each_planted_difference_is_named() -> None:
    after = recorded()
    after[SAMPLE]["sampling_params.min_p"] = ["float"]
    after[SAMPLE]["seq_id"] = ["str"]
    del after[SAMPLE]["prompt_logprobs_last_n"]
    after[DATA]["data(3).?(9)"] = ["bytes"]
    after[DATA]["(content-encoding)"] = ["zstd"]
    after[f"POST {PREFIX}/asample_v2"] = {"seq_id": ["int"], "prompt": ["null", "object"]}
    del after[f"POST {PREFIX}/get_info"]
    assert changes(recorded(), after) == [
        f"POST {PREFIX}/get_info is no longer called",
        f"{SAMPLE}: prompt_logprobs_last_n went (int)",
        f"{SAMPLE}: sampling_params.min_p came (float)",
        f"{SAMPLE}: seq_id was int, and is str",
        f"POST {PREFIX}/asample_v2 is new, with prompt (null or object), seq_id (int)",
        f"{DATA}: (content-encoding) came (zstd)",
        f"{DATA}: data(3).?(9) came (bytes)",
    ]


def test_fields_of_json_have_paths_and_types() -> None:
    body = {"a": [{"b": 1, "type": "text"}, {"b": None}], "c": {"d": 1.0, "e": True}, "f": []}
    assert fields(JSON, json.dumps(body).encode()) == {
        "a": ["list"],
        "a[]": ["object"],
        "a[].b": ["int", "null"],
        "a[].type": ["'text'"],
        "c": ["object"],
        "c.d": ["float"],
        "c.e": ["bool"],
        "f": ["list"],
    }


def test_fields_of_protobuf_have_numbers_and_wire_types() -> None:
    tensor = pb.Tensor(dense=bytes(4), element=pb.ELEMENT_FLOAT32, shape=[1])
    call = pb.ForwardBackwardCall(model="m", data=[pb.TrainingDatum(inputs={"weights": tensor})])
    # Field 2 as a text instead of a number, and fields that no message has: 9 as a varint, 10 as a double.
    unknown = b"\x12\x01x" + b"\x48\x01" + b"\x51" + bytes(8)
    assert fields(PROTOBUF, call.SerializeToString() + unknown) == {
        "model(1)": ["bytes"],
        "number(2)": ["bytes"],
        "data(3)": ["bytes"],
        "data(3).inputs(2)": ["bytes"],
        "data(3).inputs(2).key(1)": ["bytes"],
        "data(3).inputs(2).value(2)": ["bytes"],
        "data(3).inputs(2).value(2).dense(1)": ["bytes"],
        "data(3).inputs(2).value(2).element(3)": ["varint 1"],
        "data(3).inputs(2).value(2).shape(4)": ["bytes"],
        "?(9)": ["varint"],
        "?(10)": ["fixed64"],
    }


@pytest.mark.parametrize(("content_type", "body"), [(JSON, b"{"), (PROTOBUF, b"\x0a\x09x")])
def test_a_body_that_cannot_be_read_is_named(content_type: str, body: bytes) -> None:
    assert fields(content_type, body)["(body)"] == ["cannot be read"]


async def test_a_recorder_hands_on_what_it_keeps() -> None:
    heard: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        heard.append((request.path_qs, request.headers["X-API-Key"], await request.read()))
        return web.Response(status=408, body=b"\x01", content_type=PROTOBUF)

    behind = web.Application()
    behind.router.add_route("*", "/{rest:.*}", answer)
    async with TestServer(behind) as server:
        recorder = Recorder(str(server.make_url("")).rstrip("/"))
        path = f"{PREFIX}/training_runs/{'0a' * 16}:train:3/ttl"
        async with TestClient(TestServer(recorder.app())) as client:
            headers = {"X-API-Key": "tml-a", "Accept": PROTOBUF}
            sent = client.put(f"{path}?limit=3", json={"ttl": 1}, headers=headers)
            async with sent as told:
                assert (told.status, told.content_type) == (408, PROTOBUF)
                assert await told.read() == b"\x01"
    assert heard == [(f"{path}?limit=3", "tml-a", b'{"ttl": 1}')]
    assert recorder.shape == {
        f"PUT {PREFIX}/training_runs/*/ttl": {
            "(accept)": [PROTOBUF],
            "(content-type)": [JSON],
            "(limit)": ["text"],
            "ttl": ["int"],
        }
    }
