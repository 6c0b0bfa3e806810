"""The shape of a client's requests: which fields each route gets, of which types. And what differs between two shapes.

A shape is {route: {field: types}}. A field of JSON is a path such as `prompt.chunks[].tokens[]`. One of protobuf is
`data(3).chunks(1)`, our names with its numbers, or `?(9)` if `messages.proto` does not have it; its types are those of
the wire. `(accept)` is a header, and `(limit)` a field of the query.
"""

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from typing import Any

import aiohttp
from aiohttp import web
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from echo2d.net.tinker.routes import PREFIX
from echo2d.tinker import messages_pb2 as pb

Shape = dict[str, dict[str, list[str]]]

HEADERS = ("content-type", "content-encoding", "accept")
WIRE_TYPES = {0: "varint", 1: "fixed64", 2: "bytes", 5: "fixed32"}
# Sessions, and the models and samplers that are named after them.
_ID = re.compile(r"[0-9a-f]{32}(:[a-z]+:[0-9]+)?")
# The client's first heartbeat comes after 10 s. This call is answered after it.
HELD, HEARTBEAT = f"GET {PREFIX}/checkpoints", f"POST {PREFIX}/session_heartbeat"
HELD_S = 20.0


class Recorder:
    """Hands requests on to a server, and keeps their shape."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._heartbeat = asyncio.Event()

    @property
    def shape(self) -> Shape:
        return {
            route: {name: sorted(types) for name, types in sorted(fields.items())}
            for route, fields in sorted(self._seen.items())
        }

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{rest:.*}", self._pass_on)
        return app

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        route = f"{request.method} {request.path}"
        self.keep(request, body)
        if route == HEARTBEAT:
            self._heartbeat.set()
        elif route == HELD:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heartbeat.wait(), HELD_S)
        kept = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in {"host", "content-length", "transfer-encoding"}
        }
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method, self._url + request.raw_path, headers=kept, data=body
            ) as answer,
        ):
            told = {"Content-Type": answer.headers.get("Content-Type", "")}
            return web.Response(status=answer.status, body=await answer.read(), headers=told)

    def keep(self, request: web.Request, body: bytes) -> None:
        fields = self._seen[f"{request.method} {_ID.sub('*', request.path)}"]
        for name in HEADERS:
            if name in request.headers:
                fields[f"({name})"].add(request.headers[name])
        for name in request.query:
            fields[f"({name})"].add("text")
        for name, types in body_fields(request.content_type, body).items():
            fields[name] |= types


def body_fields(content_type: str, body: bytes) -> dict[str, set[str]]:
    """The fields of one body, and their types."""
    found: dict[str, set[str]] = defaultdict(set)
    try:
        if "protobuf" in content_type:
            _walk_message(found, "", pb.ForwardBackwardCall.DESCRIPTOR, body)
        elif body:
            _walk_json(found, "", json.loads(body))
    except (DecodeError, ValueError):
        found["(body)"].add("cannot be read")
    return found


def _walk_json(found: dict[str, set[str]], path: str, value: Any) -> None:
    match value:
        case dict():
            kind = "object"
            for name, each in value.items():
                _walk_json(found, f"{path}.{name}" if path else name, each)
        case list():
            kind = "list"
            for each in value:
                _walk_json(found, f"{path}[]", each)
        case str() if path.rpartition(".")[2] == "type":
            kind = repr(value)
        case _:
            kind = "null" if value is None else type(value).__name__
    if path:
        found[path].add(kind)


def _walk_message(
    found: dict[str, set[str]], path: str, descriptor: Descriptor, raw: bytes
) -> None:
    # A message without fields keeps all of them as unknown ones, with their numbers and wire types.
    for field in UnknownFieldSet(pb.Image.FromString(raw)):
        known = descriptor.fields_by_number.get(field.field_number)
        name = f"{path}{known.name if known else '?'}({field.field_number})"
        kind = WIRE_TYPES.get(field.wire_type, f"wire type {field.wire_type}")
        if known and known.type == FieldDescriptor.TYPE_ENUM:
            kind = f"{kind} {field.data}"
        if known and known.message_type and kind == "bytes":
            _walk_message(found, f"{name}.", known.message_type, field.data)
        found[name].add(kind)


def changes(before: Shape, after: Shape) -> list[str]:
    """A line for each route and field that came, went, or has other types."""
    lines = [f"{route} is no longer called" for route in sorted(before.keys() - after.keys())]
    for route, fields in sorted(after.items()):
        found = {name: " or ".join(types) for name, types in fields.items()}
        if route not in before:
            named = ", ".join(f"{name} ({types})" for name, types in sorted(found.items()))
            lines.append(f"{route} is new, with {named}")
            continue
        was = {name: " or ".join(types) for name, types in before[route].items()}
        for name in sorted(was.keys() | found.keys()):
            if name not in was:
                lines.append(f"{route}: {name} came ({found[name]})")
            elif name not in found:
                lines.append(f"{route}: {name} went ({was[name]})")
            elif was[name] != found[name]:
                lines.append(f"{route}: {name} was {was[name]}, and is {found[name]}")
    return lines
