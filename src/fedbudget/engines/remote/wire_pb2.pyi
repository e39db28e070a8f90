from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromNode(_message.Message):
    __slots__ = ("hello", "ready", "report", "more")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    report: Report
    more: bytes
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., more: _Optional[bytes] = ...) -> None: ...

class FromAggregator(_message.Message):
    __slots__ = ("welcome", "broadcast", "more", "farewell")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BROADCAST_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    FAREWELL_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    broadcast: Broadcast
    more: bytes
    farewell: Farewell
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., broadcast: _Optional[_Union[Broadcast, _Mapping]] = ..., more: _Optional[bytes] = ..., farewell: _Optional[_Union[Farewell, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "instance", "samples", "run", "rounds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    instance: str
    samples: Samples
    run: str
    rounds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., instance: _Optional[str] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., run: _Optional[str] = ..., rounds: _Optional[_Iterable[int]] = ...) -> None: ...

class Samples(_message.Message):
    __slots__ = ("sizes", "shape", "stored", "scale", "classes", "values", "parity", "features", "target")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PARITY_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    stored: str
    scale: float
    classes: _containers.RepeatedScalarFieldContainer[str]
    values: bool
    parity: bool
    features: Moments
    target: Moments
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ..., stored: _Optional[str] = ..., scale: _Optional[float] = ..., classes: _Optional[_Iterable[str]] = ..., values: bool = ..., parity: bool = ..., features: _Optional[_Union[Moments, _Mapping]] = ..., target: _Optional[_Union[Moments, _Mapping]] = ...) -> None: ...

class Moments(_message.Message):
    __slots__ = ("mean", "deviation")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    DEVIATION_FIELD_NUMBER: _ClassVar[int]
    mean: _containers.RepeatedScalarFieldContainer[float]
    deviation: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, mean: _Optional[_Iterable[float]] = ..., deviation: _Optional[_Iterable[float]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "run", "task", "numbers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    run: str
    task: Task
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, version: _Optional[int] = ..., run: _Optional[str] = ..., task: _Optional[_Union[Task, _Mapping]] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class Task(_message.Message):
    __slots__ = ("model", "parameters", "batch", "seed", "clusters", "compress", "tau_max", "samples", "asked")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    COMPRESS_FIELD_NUMBER: _ClassVar[int]
    TAU_MAX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    model: str
    parameters: int
    batch: int
    seed: int
    clusters: int
    compress: str
    tau_max: int
    samples: Samples
    asked: Request
    def __init__(self, model: _Optional[str] = ..., parameters: _Optional[int] = ..., batch: _Optional[int] = ..., seed: _Optional[int] = ..., clusters: _Optional[int] = ..., compress: _Optional[str] = ..., tau_max: _Optional[int] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., asked: _Optional[_Union[Request, _Mapping]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("estimate", "gradient", "curvature", "drift", "readings")
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    CURVATURE_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    READINGS_FIELD_NUMBER: _ClassVar[int]
    estimate: bool
    gradient: bool
    curvature: bool
    drift: bool
    readings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, estimate: bool = ..., gradient: bool = ..., curvature: bool = ..., drift: bool = ..., readings: _Optional[_Iterable[str]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("costs",)
    COSTS_FIELD_NUMBER: _ClassVar[int]
    costs: Costs
    def __init__(self, costs: _Optional[_Union[Costs, _Mapping]] = ...) -> None: ...

class Broadcast(_message.Message):
    __slots__ = ("round", "base_round", "tau", "eta", "best", "stop", "correct", "share", "catch_up", "since", "difference", "size", "vectors")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_ROUND_FIELD_NUMBER: _ClassVar[int]
    TAU_FIELD_NUMBER: _ClassVar[int]
    ETA_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    round: int
    base_round: int
    tau: int
    eta: float
    best: bool
    stop: bool
    correct: bool
    share: float
    catch_up: bool
    since: int
    difference: bool
    size: int
    vectors: bytes
    def __init__(self, round: _Optional[int] = ..., base_round: _Optional[int] = ..., tau: _Optional[int] = ..., eta: _Optional[float] = ..., best: bool = ..., stop: bool = ..., correct: bool = ..., share: _Optional[float] = ..., catch_up: bool = ..., since: _Optional[int] = ..., difference: bool = ..., size: _Optional[int] = ..., vectors: _Optional[bytes] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("round", "losses", "best_losses", "rho", "beta", "plain", "corrected", "costs", "size", "vectors")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    BEST_LOSSES_FIELD_NUMBER: _ClassVar[int]
    RHO_FIELD_NUMBER: _ClassVar[int]
    BETA_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    round: int
    losses: _containers.RepeatedScalarFieldContainer[float]
    best_losses: _containers.RepeatedScalarFieldContainer[float]
    rho: _containers.RepeatedScalarFieldContainer[float]
    beta: _containers.RepeatedScalarFieldContainer[float]
    plain: _containers.RepeatedScalarFieldContainer[float]
    corrected: _containers.RepeatedScalarFieldContainer[float]
    costs: Costs
    size: int
    vectors: bytes
    def __init__(self, round: _Optional[int] = ..., losses: _Optional[_Iterable[float]] = ..., best_losses: _Optional[_Iterable[float]] = ..., rho: _Optional[_Iterable[float]] = ..., beta: _Optional[_Iterable[float]] = ..., plain: _Optional[_Iterable[float]] = ..., corrected: _Optional[_Iterable[float]] = ..., costs: _Optional[_Union[Costs, _Mapping]] = ..., size: _Optional[int] = ..., vectors: _Optional[bytes] = ...) -> None: ...

class Costs(_message.Message):
    __slots__ = ("readings",)
    READINGS_FIELD_NUMBER: _ClassVar[int]
    readings: _containers.RepeatedCompositeFieldContainer[Reading]
    def __init__(self, readings: _Optional[_Iterable[_Union[Reading, _Mapping]]] = ...) -> None: ...

class Reading(_message.Message):
    __slots__ = ("name", "step", "whole", "host")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: float
    whole: float
    host: str
    def __init__(self, name: _Optional[str] = ..., step: _Optional[float] = ..., whole: _Optional[float] = ..., host: _Optional[str] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("reason", "again")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    again: bool
    def __init__(self, reason: _Optional[str] = ..., again: bool = ...) -> None: ...
