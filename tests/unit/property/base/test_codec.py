"""Any bytes decode to a message or a PeerFault; any message survives the round trip."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2d.core.base.ids import Digest, Version
from echo2d.core.protocol.builds import Build
from echo2d.core.protocol.control_messages import (
    TO_COORDINATOR,
    TO_PEER,
    Address,
    HeldLease,
    Hello,
    SampleFinished,
    ToCoordinator,
    VersionKey,
    VersionSpan,
)
from echo2d.core.protocol.trajectory import (
    pack_logprobs,
    pack_tokens,
    unpack_logprobs,
    unpack_tokens,
)
from echo2d.errors import PeerFault

KEYS = st.builds(
    VersionKey,
    st.integers(0, 1 << 40).map(Version),
    st.binary(min_size=32, max_size=32).map(Digest),
)
SPANS = st.builds(
    VersionSpan,
    st.integers(0, 99),
    st.integers(0, 99),
    st.integers(0, 9).map(Version),
    st.just(Digest(b"d" * 32)),
)
HELLOS = st.builds(
    Hello,
    build=st.builds(Build, st.integers(0, 9), st.integers(0, 9), st.text()),
    slots=st.integers(0, 999),
    listen=st.none() | st.builds(Address, st.text(max_size=9), st.integers(0, 65535)),
    serving=st.none() | KEYS,
    holding=st.lists(KEYS, max_size=3).map(tuple),
    leases=st.lists(st.builds(HeldLease, st.integers(0, 9), st.integers(0, 9)), max_size=3).map(
        tuple
    ),
)
RESULTS = st.builds(
    SampleFinished,
    lease=st.integers(0, 99),
    attempt=st.integers(0, 9),
    sample=st.integers(0, 9),
    spans=st.lists(SPANS, max_size=3).map(tuple),
)
JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(HELLOS | RESULTS)
def test_any_message_round_trips(message: ToCoordinator) -> None:
    assert TO_COORDINATOR.decode(TO_COORDINATOR.encode(message)) == message


@given(st.binary(max_size=300))
def test_any_bytes_give_a_message_or_a_peer_fault(data: bytes) -> None:
    for codec in (TO_COORDINATOR, TO_PEER):
        with pytest.raises(PeerFault):
            codec.decode(data)


@given(
    st.sampled_from(["Hello", "SampleFinished", "LeaseGranted", "PlanEdges", "Nothing"]),
    st.lists(JSON_LIKE, max_size=12),
)
def test_any_fields_give_a_message_or_a_peer_fault(tag: str, fields: list[object]) -> None:
    for codec in (TO_COORDINATOR, TO_PEER):
        try:
            message = codec.decode(msgpack.packb([tag, *fields]))
        except PeerFault:
            continue
        assert codec.decode(codec.encode(message)) == message


@given(
    st.lists(st.integers(-(1 << 31), (1 << 31) - 1)), st.lists(st.floats(width=32, allow_nan=False))
)
def test_token_arrays_round_trip(tokens: list[int], logprobs: list[float]) -> None:
    assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens
    assert unpack_logprobs(pack_logprobs(logprobs)).tolist() == logprobs


@given(st.binary(max_size=64))
def test_ragged_arrays_are_a_peer_fault(data: bytes) -> None:
    if len(data) % 4:
        with pytest.raises(PeerFault):
            unpack_tokens(data)
        with pytest.raises(PeerFault):
            unpack_logprobs(data)
    else:
        assert len(unpack_tokens(data)) == len(unpack_logprobs(data)) == len(data) // 4
