"""Types of settings, and settings as keyword arguments for type checkers."""

from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from fedbudget.settings.option import Count, Impute, NotNegative, Positive

MethodName = Literal[
    "accelerated", "frugal", "paper", "newton", "centralized", "asynchronous"
]
Delta = Literal["gradient", "parameters"]
CostSource = Literal["simulated", "measured"]
Compression = Literal["none", "16-bit", "8-bit", "auto"]
EngineName = Literal["in-process", "ray", "network"]
Keep = Literal["best-loss", "best-on-test"]
UpdateName = Literal[
    "average", "accelerate", "fedavgm", "fedadam", "fedyogi", "fedexp", "prodigy"
]
LocalStepName = Literal["delta-sgd", "dog"]
WorkloadName = Literal["by-speed", "equal", "by-data"]
CombineName = Literal["mean", "clipped", "trimmed", "median"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
NoiseName = Literal["secret", "seeded"]
PrivacyUnit = Literal["node", "sample"]
AttackName = Literal["sign-flip", "scale", "noise", "label-flip"]
Tau = Count | Literal["adaptive"]
BatchSize = Count | Literal["full"]
Eta = Positive | Literal["auto"]
Chance = Annotated[float, Meta(gt=0, le=1)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Most = Annotated[float, Meta(gt=0.5, le=1)]
Gamma = Annotated[float, Meta(ge=1)]
Seed = Annotated[int, Meta(ge=0)]
Names = tuple[str, ...]


class SettingsOptions(TypedDict, total=False):
    """Fields of `Settings` as arguments, without those that `train` widens.

    These are model, dataset, nodes, budget, until, step_size, update and combine.
    """

    data_dir: str | None
    target: str | None
    drop: Names | None
    categorical: Names | None
    impute: Impute | None
    missing: Names | None
    classes: Names | None
    standardise: bool | None
    schema: str | None
    test_share: Fraction
    validation: Fraction | None
    spend_all: bool
    personal: bool
    train_samples: Count | None
    test_samples: Count | None
    partition: str | None
    method: MethodName
    drift_correction: bool | None
    delta: Delta | None
    tau: Tau
    costs: CostSource
    privacy_delta: Chance | None
    privacy_noise: NoiseName | None
    privacy_unit: PrivacyUnit | None
    privacy_ledger: str | None
    aggregation_factor: Positive
    speeds: tuple[float, ...] | str | None
    workload: WorkloadName | None
    participation: Chance
    attack: AttackName | None
    attackers: Count | None
    batch_size: BatchSize | None
    step_fall: Share | None
    local_step: LocalStepName | None
    server_step_size: Positive | None
    server_momentum: Fraction | None
    server_beta2: Fraction | None
    server_epsilon: Positive | None
    proximal: Positive | None
    phi: Positive | None
    gamma: Gamma
    tau_max: Count
    seed: Seed
    rounds: Count | None
    patience: Count | None
    keep: Keep
    evaluations: Count
    class_weights: tuple[Positive, ...] | Literal["balanced"] | None
    clusters: Count
    device: str
    min_nodes: Count | None
    round_timeout: Positive | None
    compress: Compression | None
    max_share: Chance | None
    secure_aggregation: bool | None
    secure_threshold: Most | None
    watts: NotNegative
    joules_per_byte: NotNegative
    price_per_hour: NotNegative
    price_per_gigabyte: NotNegative
