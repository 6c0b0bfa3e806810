from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Element(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELEMENT_UNKNOWN: _ClassVar[Element]
    ELEMENT_FLOAT32: _ClassVar[Element]
    ELEMENT_INT64: _ClassVar[Element]
    ELEMENT_INT32: _ClassVar[Element]
    ELEMENT_BFLOAT16: _ClassVar[Element]

class EndReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_STOP: _ClassVar[EndReason]
    END_LENGTH: _ClassVar[EndReason]
ELEMENT_UNKNOWN: Element
ELEMENT_FLOAT32: Element
ELEMENT_INT64: Element
ELEMENT_INT32: Element
ELEMENT_BFLOAT16: Element
END_STOP: EndReason
END_LENGTH: EndReason

class CallHead(_message.Message):
    __slots__ = ("model", "number", "loss", "forward_only")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    model: str
    number: int
    loss: str
    forward_only: bool
    def __init__(self, model: _Optional[str] = ..., number: _Optional[int] = ..., loss: _Optional[str] = ..., forward_only: bool = ...) -> None: ...

class ForwardBackwardCall(_message.Message):
    __slots__ = ("model", "number", "data", "loss", "old_config", "forward_only", "config")
    class OldConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Setting
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Setting, _Mapping]] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OLD_CONFIG_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    model: str
    number: int
    data: _containers.RepeatedCompositeFieldContainer[TrainingDatum]
    loss: str
    old_config: _containers.ScalarMap[str, float]
    forward_only: bool
    config: _containers.MessageMap[str, Setting]
    def __init__(self, model: _Optional[str] = ..., number: _Optional[int] = ..., data: _Optional[_Iterable[_Union[TrainingDatum, _Mapping]]] = ..., loss: _Optional[str] = ..., old_config: _Optional[_Mapping[str, float]] = ..., forward_only: bool = ..., config: _Optional[_Mapping[str, Setting]] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("number", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: float
    text: str
    def __init__(self, number: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class TrainingDatum(_message.Message):
    __slots__ = ("chunks", "inputs", "token_spans", "target_spans")
    class InputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SPANS_FIELD_NUMBER: _ClassVar[int]
    TARGET_SPANS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[InputChunk]
    inputs: _containers.MessageMap[str, Tensor]
    token_spans: _containers.RepeatedCompositeFieldContainer[OriginSpan]
    target_spans: _containers.RepeatedCompositeFieldContainer[OriginSpan]
    def __init__(self, chunks: _Optional[_Iterable[_Union[InputChunk, _Mapping]]] = ..., inputs: _Optional[_Mapping[str, Tensor]] = ..., token_spans: _Optional[_Iterable[_Union[OriginSpan, _Mapping]]] = ..., target_spans: _Optional[_Iterable[_Union[OriginSpan, _Mapping]]] = ...) -> None: ...

class InputChunk(_message.Message):
    __slots__ = ("text", "image", "sound")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    SOUND_FIELD_NUMBER: _ClassVar[int]
    text: Text
    image: Image
    sound: Sound
    def __init__(self, text: _Optional[_Union[Text, _Mapping]] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., sound: _Optional[_Union[Sound, _Mapping]] = ...) -> None: ...

class Text(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    def __init__(self, tokens: _Optional[bytes] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sound(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dense", "sparse", "element", "shape")
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dense: bytes
    sparse: SparseRows
    element: Element
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dense: _Optional[bytes] = ..., sparse: _Optional[_Union[SparseRows, _Mapping]] = ..., element: _Optional[_Union[Element, str]] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class SparseRows(_message.Message):
    __slots__ = ("entries", "row_starts", "columns")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ROW_STARTS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    entries: bytes
    row_starts: bytes
    columns: bytes
    def __init__(self, entries: _Optional[bytes] = ..., row_starts: _Optional[bytes] = ..., columns: _Optional[bytes] = ...) -> None: ...

class OriginSpan(_message.Message):
    __slots__ = ("prompt", "sampled")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    prompt: SequencePart
    sampled: SequencePart
    def __init__(self, prompt: _Optional[_Union[SequencePart, _Mapping]] = ..., sampled: _Optional[_Union[SequencePart, _Mapping]] = ...) -> None: ...

class SequencePart(_message.Message):
    __slots__ = ("sequence", "offset", "length")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence: str
    offset: int
    length: int
    def __init__(self, sequence: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ForwardBackwardResult(_message.Message):
    __slots__ = ("record_type", "records", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RECORD_TYPE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    record_type: str
    records: _containers.RepeatedCompositeFieldContainer[Records]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, record_type: _Optional[str] = ..., records: _Optional[_Iterable[_Union[Records, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Records(_message.Message):
    __slots__ = ("record_type", "fields", "datums")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Ragged
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Ragged, _Mapping]] = ...) -> None: ...
    RECORD_TYPE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    DATUMS_FIELD_NUMBER: _ClassVar[int]
    record_type: str
    fields: _containers.MessageMap[str, Ragged]
    datums: int
    def __init__(self, record_type: _Optional[str] = ..., fields: _Optional[_Mapping[str, Ragged]] = ..., datums: _Optional[int] = ...) -> None: ...

class Ragged(_message.Message):
    __slots__ = ("data", "offsets", "element", "other_axes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_FIELD_NUMBER: _ClassVar[int]
    OTHER_AXES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offsets: bytes
    element: Element
    other_axes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., element: _Optional[_Union[Element, str]] = ..., other_axes: _Optional[_Iterable[int]] = ...) -> None: ...

class SampleResult(_message.Message):
    __slots__ = ("sequences", "prompt_logprobs", "prompt_top_tokens", "cached_prompt_tokens", "target_prompt_logprobs", "prompt_alternatives")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[Sampled]
    prompt_logprobs: bytes
    prompt_top_tokens: TopTokens
    cached_prompt_tokens: int
    target_prompt_logprobs: Tensor
    prompt_alternatives: PromptAlternatives
    def __init__(self, sequences: _Optional[_Iterable[_Union[Sampled, _Mapping]]] = ..., prompt_logprobs: _Optional[bytes] = ..., prompt_top_tokens: _Optional[_Union[TopTokens, _Mapping]] = ..., cached_prompt_tokens: _Optional[int] = ..., target_prompt_logprobs: _Optional[_Union[Tensor, _Mapping]] = ..., prompt_alternatives: _Optional[_Union[PromptAlternatives, _Mapping]] = ...) -> None: ...

class Sampled(_message.Message):
    __slots__ = ("end", "tokens", "logprobs", "top_tokens")
    END_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    end: EndReason
    tokens: bytes
    logprobs: bytes
    top_tokens: TopTokens
    def __init__(self, end: _Optional[_Union[EndReason, str]] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top_tokens: _Optional[_Union[TopTokens, _Mapping]] = ...) -> None: ...

class TopTokens(_message.Message):
    __slots__ = ("tokens", "logprobs", "kept", "positions")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    logprobs: bytes
    kept: int
    positions: int
    def __init__(self, tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., kept: _Optional[int] = ..., positions: _Optional[int] = ...) -> None: ...

class PromptAlternatives(_message.Message):
    __slots__ = ("tokens", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: Tensor
    logprobs: Tensor
    def __init__(self, tokens: _Optional[_Union[Tensor, _Mapping]] = ..., logprobs: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class PromptCall(_message.Message):
    __slots__ = ("tokens", "logprobs", "last", "top_tokens", "targets", "alternatives", "temperature", "rng_seed")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    RNG_SEED_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    logprobs: bool
    last: int
    top_tokens: int
    targets: Tensor
    alternatives: int
    temperature: float
    rng_seed: int
    def __init__(self, tokens: _Optional[bytes] = ..., logprobs: bool = ..., last: _Optional[int] = ..., top_tokens: _Optional[int] = ..., targets: _Optional[_Union[Tensor, _Mapping]] = ..., alternatives: _Optional[int] = ..., temperature: _Optional[float] = ..., rng_seed: _Optional[int] = ...) -> None: ...
