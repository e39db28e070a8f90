from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromNode(_message.Message):
    __slots__ = ("hello", "ready", "report", "more", "refusal", "masking")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MASKING_FIELD_NUMBER: _ClassVar[int]
    hello: Description
    ready: Ready
    report: Report
    more: bytes
    refusal: str
    masking: bytes
    def __init__(self, hello: _Optional[_Union[Description, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., more: _Optional[bytes] = ..., refusal: _Optional[str] = ..., masking: _Optional[bytes] = ...) -> None: ...

class FromAggregator(_message.Message):
    __slots__ = ("welcome", "broadcast", "more", "farewell", "masking")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    MASKING_FIELD_NUMBER: _ClassVar[int]
    welcome: Description
    broadcast: Broadcast
    more: bytes
    farewell: Farewell
    masking: bytes
    def __init__(self, welcome: _Optional[_Union[Description, _Mapping]] = ..., broadcast: _Optional[_Union[Broadcast, _Mapping]] = ..., more: _Optional[bytes] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ..., masking: _Optional[bytes] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("version", "value")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    version: int
    value: bytes
    def __init__(self, version: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("costs",)
    COSTS_FIELD_NUMBER: _ClassVar[int]
    costs: bytes
    def __init__(self, costs: _Optional[bytes] = ...) -> None: ...

class Broadcast(_message.Message):
    __slots__ = ("base_round", "numbers", "difference", "size", "vectors")
    BASE_ROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    base_round: int
    numbers: bytes
    difference: bool
    size: int
    vectors: bytes
    def __init__(self, base_round: _Optional[int] = ..., numbers: _Optional[bytes] = ..., difference: bool = ..., size: _Optional[int] = ..., vectors: _Optional[bytes] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("round", "numbers", "costs", "size", "vectors", "tallies")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    TALLIES_FIELD_NUMBER: _ClassVar[int]
    round: int
    numbers: bytes
    costs: bytes
    size: int
    vectors: bytes
    tallies: bytes
    def __init__(self, round: _Optional[int] = ..., numbers: _Optional[bytes] = ..., costs: _Optional[bytes] = ..., size: _Optional[int] = ..., vectors: _Optional[bytes] = ..., tallies: _Optional[bytes] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason", "again")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    again: bool
    def __init__(self, reason: _Optional[str] = ..., again: bool = ...) -> None: ...
