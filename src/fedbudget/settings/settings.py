"""Settings of a run: everything needed to repeat it, each declared once.

The command line, TOML files, `fedbudget.train` and Flower's run-config are derived from the
fields of `Settings`: the option `--step-size` is the key `step-size` in a file and the
argument `step_size` in Python. To add a setting, add a field here and a line in
`SettingsOptions` (types.py). Each value is checked against its type, then all together
(compatibility.py).
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import tomli_w

from fedbudget import python_file, tasks
from fedbudget.errors import UserError, key, printable, unknown
from fedbudget.settings.compatibility import require_compatible
from fedbudget.settings.option import (
    Count,
    Impute,
    NotNegative,
    Positive,
    declarations,
    option,
    paths_from,
    read_toml,
)
from fedbudget.settings.types import (
    AttackName,
    BatchSize,
    Chance,
    CombineName,
    Compression,
    CostSource,
    Delta,
    Eta,
    Fraction,
    Gamma,
    Keep,
    LocalStepName,
    MethodName,
    Most,
    Names,
    NoiseName,
    PrivacyUnit,
    Seed,
    Share,
    Tau,
    UpdateName,
    WorkloadName,
)

if TYPE_CHECKING:
    from fedbudget.budget.budget import Budget
    from fedbudget.data.partition import Partition
    from fedbudget.data.tables import TableOptions
    from fedbudget.evaluation.targets import MetricTarget

ELSEWHERE = {
    "epochs": "`rounds` and `tau`; by default `budget` decides both",
    "steps": "`tau`, the local updates per round",
    "lr": "`step_size`",
    "learning_rate": "`step_size`",
    "clients": "`nodes`",
    "batch": "`batch_size`",
    "optimizer": "`update`, the update rule of the aggregator",
    "output": "`out`",
}
"""What options of other programs are called here."""

MODELS = ("svm", "linear", "kmeans", "softmax", "mlp", "cnn", "lenet")
SMALL_DATASETS = ("breast-cancer", "diabetes", "wine", "mnist-small", "fashion-mnist-small")
NATURAL_DATASETS = (
    *("heart-disease", "tcga-brca", "beijing-air", "parkinsons"),
    *("cmapss", "shakespeare", "omniglot"),
)
DATASETS = (
    "digits",
    "mnist",
    "fashion-mnist",
    "cifar-10",
    "energy",
    "user-knowledge",
    *SMALL_DATASETS,
    *NATURAL_DATASETS,
)
"""Names of models and datasets, listed here so that help needs no imports."""


_FILES = (".csv", ".tsv", ".parquet", ".feather", ".arrow", ".npz")
_RUN = ("run",)
_COMPARE = ("run", "compare")
_NETWORK = ("serve", "local")
_ONE_RUN = ("run", "serve", "local")
_DATA = (*_ONE_RUN, "compare", "join")


@dataclass(frozen=True)
class Settings:
    """Settings of a run: model, data, budget and method.

    `fedbudget run --help` describes every field. A default of None means that the value
    depends on the other settings and on the data.
    """

    COMMANDS: ClassVar = ("run", "serve", "local", "compare")

    model: str | None = option(
        None,
        f"Model to train: {', '.join(MODELS)}, or your own as FILE:NAME, such as "
        "net.py:Net.",
        "most used",
        (*COMMANDS, "join"),
        shown="softmax for classes, linear for numbers",
        values=MODELS,
        helps={
            "join": "Only model that this node trains: a name, or your own as FILE:NAME, "
            "such as net.py:Net."
        },
    )
    dataset: str = option(
        "digits",
        f"Dataset: {', '.join(DATASETS)}, or the path of a .csv, .tsv, .parquet, .feather, "
        ".arrow or .npz, or of a folder with one file per node.",
        "most used",
        _DATA,
        values=lambda start: [*DATASETS, *paths_from(start, *_FILES)],
    )
    data_dir: str | None = option(
        None,
        "Folder searched first for datasets.",
        "data",
        (*_DATA, "sweep", "reproduce", "evaluate", "describe"),
        shown="FEDBUDGET_DATA, then the cache folder",
    )
    target: str | None = option(
        None,
        "Column of a table to predict.",
        "data",
        (*_DATA, "evaluate", "schema", "describe"),
        shown="the last",
    )
    drop: Names | None = option(
        None,
        "Columns of tables to ignore, such as id,date.",
        "data",
        (*_DATA, "evaluate", "schema", "describe"),
        commas=True,
    )
    categorical: Names | None = option(
        None,
        "Columns of tables with categories.",
        "data",
        (*_DATA, "schema", "describe"),
        shown="text with few different values",
        commas=True,
    )
    impute: Impute | None = option(
        None,
        "Value for missing numbers in a CSV: mean, median or most-frequent; missing "
        "categories become the most frequent one.",
        "data",
        _DATA,
        shown="missing cells are an error",
    )
    missing: Names | None = option(
        None,
        'Further texts that mark a missing cell of a CSV, such as "<0.5".',
        "data",
        (*_DATA, "schema", "describe"),
        shown="empty, NA, NaN, null, None, ?, - and .",
        commas=True,
    )
    classes: Names | None = option(
        None,
        "All classes in order, such as well,ill.",
        "data",
        (*_DATA, "schema"),
        shown="those in the data",
        commas=True,
    )
    standardise: bool | None = option(
        None,
        "Scale features to mean 0 and standard deviation 1.",
        "data",
        _DATA,
        shown="only for a CSV",
    )
    schema: str | None = option(
        None,
        "TOML file with public ranges, categories and classes of a table; fedbudget data "
        "schema drafts one. Private runs on tables need it.",
        "data",
        _DATA,
        shown="from the data",
        values=lambda start: paths_from(start, ".toml"),
    )
    test_share: Fraction = option(
        0.2,
        "Fraction of samples held out for testing; for --data of a node 0 by default.",
        "data",
        _DATA,
    )
    validation: Fraction | None = option(
        None,
        "Fraction of each node's training samples held out to choose the model; 0 to train "
        "on all of them.",
        "method",
        shown="0.15; 0 with paper, baselines and privacy",
    )
    spend_all: bool = option(
        False,
        "Spend the whole budget, even if validation stops improving.",
        "budget",
    )
    personal: bool = option(
        False,
        "After training, let each node correct the model on its own rows.",
        "method",
        _ONE_RUN,
    )
    train_samples: Count | None = option(
        None, "Number of training samples to draw, different for each seed.", "data", _DATA
    )
    test_samples: Count | None = option(
        None,
        "Number of test samples to draw, different for each seed.",
        "data",
        (*_COMPARE, "local"),
    )
    nodes: Count | None = option(
        None,
        "Number of nodes.",
        "most used",
        shown="5, or one per file or site",
        helps={
            "serve": "Number of nodes to wait for before the first round.  "
            "[default: --min-nodes]",
            "local": "Number of node processes to start.  [default: 5, or one per file or "
            "site]",
        },
    )
    partition: str | None = option(
        None,
        "Distribution of data over nodes: case:N, dirichlet:ALPHA, labels:K per node, "
        "draw:SAMPLES, files, or by:COLUMN of tables, with one node per value.",
        "data",
        (*_DATA, "describe"),
        shown="case:1; files for a folder; the sites of a natural federation",
        helps={
            "compare": "With --rivals, distribution of data instead of --cases: case:N, "
            "dirichlet:ALPHA, labels:K, draw:N, files or by:COLUMN.",
            "describe": "by:COLUMN for the column whose values are the sites.",
        },
    )
    method: MethodName = option(
        "accelerated",
        "Method: accelerated (drift correction and adaptive momentum), frugal (drift "
        "correction, τ from the paper's bound), paper (the paper's algorithm exactly), "
        "newton (solves linear, softmax and svm with few features), or the baselines "
        "centralized and asynchronous gradient descent.",
        "most used",
    )
    drift_correction: bool | None = option(
        None, "Correct local updates for drift.", "method", shown="depends on --method"
    )
    delta: Delta | None = option(
        None,
        "Estimate δ from parameters or gradient.",
        "method",
        shown="depends on --method",
    )
    tau: Tau = option(
        "adaptive",
        "Local updates per round (τ): adaptive, or a fixed number.",
        "method",
        _ONE_RUN,
    )
    budget: tuple[str, ...] = option(
        ("time=15s",),
        "Limit of one resource, may be repeated: time=15s, energy=500J, bytes=20MB, "
        "cpu=30s, money=0.40, privacy=4.",
        "most used",
    )
    privacy_delta: Chance | None = option(
        None, "δ of a privacy budget.", "budget", shown="1e-5, below 1/nodes²"
    )
    privacy_noise: NoiseName | None = option(
        None,
        "Noise of a privacy budget: secret (from the operating system) or seeded "
        "(repeatable: it hides nothing, and ε is only simulated).",
        "budget",
        _COMPARE,
        shown="secret; with a dataset above, seeded",
    )
    privacy_unit: PrivacyUnit | None = option(
        None,
        "Unit that a privacy budget protects: node (with all its samples) or sample.",
        "budget",
        shown="node",
    )
    privacy_ledger: str | None = option(
        None,
        "File that adds up the privacy of all runs on the same data; in a folder, a file "
        "named after the data.",
        "budget",
        ("run", "serve"),
        shown="none",
    )
    costs: CostSource = option(
        "simulated",
        "Cost of rounds: simulated (laptops and Raspberry Pis of the paper) or measured "
        "(by clocks and meters).",
        "budget",
        shown="simulated; measured for your own data or model",
        defaults={
            **dict.fromkeys(("serve", "local", "flower"), "measured"),
            **dict.fromkeys(("compare", "sweep"), "simulated"),
        },
    )
    aggregation_factor: Positive = option(
        1.0,
        "Simulated aggregation time, relative to the prototype.",
        "budget",
        _COMPARE,
    )
    speeds: tuple[float, ...] | str | None = option(
        None,
        "Relative speed of each simulated node: a list such as 4,4,1,1,1, or "
        "lognormal:1.0 to draw speeds.",
        "budget",
        (*_COMPARE, *_NETWORK),
        shown="equal; with asynchronous two of five are fast",
    )
    workload: WorkloadName | None = option(
        None,
        "Local updates of each node: by-speed (more on faster nodes if time is the "
        "scarcest resource), equal (τ on all), or by-data (in proportion to samples, as "
        "in FedNova; simulated nodes only).",
        "method",
        shown="by-speed with adaptive τ and drift correction",
    )
    participation: Chance = option(
        1.0, "Probability that a node takes part in a round.", "method"
    )
    attack: AttackName | None = option(
        None,
        "Simulated attack by some nodes: sign-flip, scale, noise or label-flip.",
        "method",
        _RUN,
        shown="none",
    )
    attackers: Count | None = option(
        None, "Number of attacking nodes.", "method", _RUN, shown="1"
    )
    batch_size: BatchSize | None = option(
        None, "Samples per mini-batch, or full.", "method", shown="100"
    )
    step_size: Eta | None = option(
        None, "Step size (η), or auto.", "method", shown="auto, or 0.01 with paper"
    )
    step_fall: Share | None = option(
        None,
        "Final fraction of the budget over which a fixed step size decreases.",
        "method",
        shown="0",
    )
    local_step: LocalStepName | None = option(
        None,
        "Step sizes that nodes choose themselves in local updates: delta-sgd or dog.",
        "method",
        shown="all nodes use η",
    )
    update: UpdateName | None = option(
        None,
        "Update rule of the aggregator: average, accelerate, fedavgm, fedadam, fedyogi, "
        "fedexp or prodigy.",
        "method",
        shown="accelerate with method accelerated, else average",
    )
    combine: CombineName | None = option(
        None,
        "Combination of the updates of nodes: mean, clipped, trimmed or median.",
        "method",
        shown="mean; with serve clipped",
    )
    server_step_size: Positive | None = option(
        None,
        "Step size of the update rule.",
        "method",
        shown="1 with fedavgm, 0.1 with fedadam and fedyogi",
    )
    server_momentum: Fraction | None = option(
        None,
        "Momentum of the update rule: β of accelerate and fedavgm, β₁ of fedadam, fedyogi "
        "and prodigy.",
        "method",
        shown="0.95 with accelerate, else 0.9",
    )
    server_beta2: Fraction | None = option(
        None,
        "β₂ of fedadam, fedyogi and prodigy.",
        "method",
        shown="0.99, or 0.999 with prodigy",
    )
    server_epsilon: Positive | None = option(
        None,
        "ε of fedadam, fedyogi, fedexp and prodigy; larger values adapt less.",
        "method",
        shown="0.001, or 1e-8 with prodigy",
    )
    proximal: Positive | None = option(
        None,
        "μ of FedProx, which keeps local updates close to the global model.",
        "method",
        shown="0",
    )
    phi: Positive | None = option(
        None,
        "Control parameter φ; larger values lead to smaller τ.",
        "method",
        shown="0.0025 with drift correction; else 0.025, or 5e-5 for cnn",
    )
    gamma: Gamma = option(10.0, "Largest ratio of the next τ to the last.", "method")
    tau_max: Count = option(100, "Largest τ.", "method")
    seed: Seed = option(0, "Random seed.", "method", (*_ONE_RUN, "join"))
    rounds: Count | None = option(
        None, "Maximum number of rounds, in addition to the budget.", "budget", _ONE_RUN
    )
    until: tuple[str, ...] | None = option(
        None,
        "Target that stops the run early, may be repeated (the first one reached counts): "
        "accuracy=0.95 (at least, on test samples), loss=0.3 (at most, on training "
        "samples), or a metric of the model on test samples.",
        "budget",
        _ONE_RUN,
    )
    patience: Count | None = option(
        None,
        "Stop when N rounds improve the mean by less than 1 % over the N rounds before: of "
        "accuracy if --until has it, else of loss. Use at least 20 because of noise.",
        "budget",
        _ONE_RUN,
        shown="off",
    )
    keep: Keep = option(
        "best-loss",
        "Parameters to return: best-loss (on training samples), or best-on-test, for "
        "which the reported accuracy is optimistic: the same samples chose the parameters.",
        "output",
        _ONE_RUN,
    )
    evaluations: Count = option(
        50,
        "Maximum number of evaluations on test samples; four times as many with --until or "
        "--keep best-on-test.",
        "output",
        _ONE_RUN,
    )
    class_weights: tuple[Positive, ...] | Literal["balanced"] | None = option(
        None,
        "Weight of each class in the loss of softmax or a network: numbers such as 1,5, or "
        "balanced, inversely proportional to the number of samples.",
        "model",
        ("run", "compare"),
        shown="1 for all",
    )
    clusters: Count = option(4, "Number of clusters of kmeans.", "model")
    device: str = option(
        "auto",
        "Device for PyTorch: auto, cpu or cuda.",
        "model",
        _DATA,
        values=("auto", "cpu", "cuda"),
    )
    min_nodes: Count | None = option(
        None, "Minimum number of nodes in a round.", "network", _NETWORK, shown="1"
    )
    round_timeout: Positive | None = option(
        None,
        "Seconds after which a round continues without nodes that have not reported.",
        "network",
        _NETWORK,
        shown="from the duration of past rounds",
    )
    compress: Compression | None = option(
        None,
        "Encoding of parameters: none, 16-bit, 8-bit or auto.",
        "network",
        shown="auto; simulated, none",
    )
    max_share: Chance | None = option(
        None,
        "Largest weight of one node in the average.",
        "network",
        _NETWORK,
        shown="0.5 with three or more nodes",
    )
    secure_aggregation: bool | None = option(
        None,
        "Mask reports, so that the aggregator can read only their sum.",
        "network",
        _ONE_RUN,
    )
    secure_threshold: Most | None = option(
        None,
        "Fraction of a group of nodes needed to open a masked sum.",
        "network",
        _ONE_RUN,
        shown="2/3",
    )
    watts: NotNegative = option(5.0, "Power of a node in watts, for energy.", "budget")
    joules_per_byte: NotNegative = option(
        1e-6, "Energy to send one byte, in joules.", "budget", shown="1e-6"
    )
    price_per_hour: NotNegative = option(0.1, "Price of a node per hour.", "budget")
    price_per_gigabyte: NotNegative = option(0.1, "Price to send one gigabyte.", "budget")

    def __post_init__(self) -> None:
        for name, declared in declarations(Settings).items():
            if (value := getattr(self, name)) is not declared.default:
                object.__setattr__(self, name, declared.converted(value))
        if self.classes and len(set(self.classes)) < len(self.classes):
            raise UserError(f"`classes` contains a duplicate: {', '.join(self.classes)}")
        if self.partition is not None:
            self._partition()
        if isinstance(self.speeds, str):
            from fedbudget.resources.speeds import spread_of

            spread_of(self.speeds)
        require_compatible(self)

    def limits(self) -> "Budget":
        from fedbudget.budget.budget import Budget

        return Budget.parse(self.budget)

    def table_options(self) -> "TableOptions":
        """Return how tables are read."""
        from fedbudget.data.tables import TableOptions

        if self.schema is not None:
            from fedbudget.data.schema import read_schema

            return read_schema(Path(self.schema).expanduser()).options
        return TableOptions(
            self.target,
            self.drop or (),
            self.categorical or (),
            self.impute,
            self.classes,
            site=self._partition().by,
            missing=self.missing or (),
        )

    def _partition(self) -> "Partition":
        from fedbudget.data.partition import Partition

        return Partition.parse(self.partition or "files")

    def targets(self) -> "tuple[MetricTarget, ...]":
        from fedbudget.evaluation.targets import MetricTarget

        return tuple(map(MetricTarget.parse, self.until or ()))

    @classmethod
    def combined(
        cls,
        given: Mapping[str, Any],
        *,
        task: str | None = None,
        config: Path | None = None,
        case: int | None = None,
        command: str = "run",
        own: bool = False,
    ) -> "Settings":
        """Merge given values, a task or file, and the defaults of a command, in this order.

        Args:
          given: values by the names of fields; unknown names are refused.
          case: short for the partition `case:N`.
          own: whether data or model are objects of the caller.
        """
        for name in given:
            if name in ELSEWHERE:
                raise UserError(f"unknown argument {name!r}; use {ELSEWHERE[name]}")
            if name not in declarations(Settings):
                known = [*declarations(Settings), "task", "case"]
                raise unknown("argument", name, known, "see help(fedbudget.Settings)")
        require_compatible(
            task=task, config=config, case=case, partition=given.get("partition")
        )
        if case is not None:
            given = {**given, "partition": f"case:{case}"}
        file = config if task is None else tasks.path(task)
        from_file = {} if file is None else cls.from_toml(file)
        settings = cls(**{**defaults_of(command), **from_file, **given})
        if command == "run" and "costs" not in {**from_file, **given}:
            return replace(settings, costs=_default_costs(settings, own=own))
        return settings

    @classmethod
    def from_toml(cls, path: Path) -> dict[str, Any]:
        """Return the settings in a file, checked key by key, without defaults."""
        return read_settings(read_toml(path), str(path))

    def to_toml(self) -> str:
        return tomli_w.dumps(
            {key(name): value for name, value in vars(self).items() if value is not None}
        )


def _default_costs(settings: Settings, *, own: bool) -> CostSource:
    """Return measured costs for data or models of the user, which run on this machine.

    The costs of the paper's prototype belong to its tasks, and to options that describe
    simulated machines.
    """
    own_data = settings.dataset not in DATASETS
    own_model = python_file.is_reference(settings.model or "")
    simulated_machines = (
        settings.speeds is not None
        or settings.aggregation_factor != 1
        or settings.method == "asynchronous"
    )
    if (own or own_data or own_model) and not simulated_machines:
        return "measured"
    return "simulated"


def require_chosen_code(where: Path, saved: Settings, given: Container[str] = ()) -> None:
    """Refuse Python files that a run's folder names, unless the caller named them too.

    Args:
      where: the folder, for messages.
      saved: its settings.
      given: names of the settings that the caller passed now.
    """
    for name in ("model", "dataset"):
        value = getattr(saved, name)
        if name not in given and value is not None and python_file.is_reference(value):
            raise UserError(
                f"{where} uses {printable(value)}, a Python file. Files do not choose code "
                f"that runs here: if you trust it, pass it again, as `{name}`"
            )


def read_settings(
    values: Mapping[str, Any], where: str, also: Iterable[str] = ()
) -> dict[str, Any]:
    """Convert the keys of a file to fields; errors name the key and its place.

    Args:
      where: the file, or a section of one.
      also: other allowed keys, which the caller reads.
    """
    require_keys(values, where, also)
    known = {key(name): declared for name, declared in declarations(Settings).items()}
    try:
        return {
            known[name].name: known[name].converted(value)
            for name, value in values.items()
            if name in known
        }
    except UserError as error:
        raise UserError(f"{where}: {error.spelled(key)}") from None


def require_keys(names: Iterable[str], where: str, also: Iterable[str] = ()) -> None:
    """Refuse a key that is neither a setting nor in `also`."""
    known = [*map(key, declarations(Settings)), *also]
    for name in names:
        if name not in known:
            raise UserError(
                f"{where}: {unknown('key', name, known, 'known are ' + ', '.join(known))}"
            )


def defaults_of(command: str) -> dict[str, Any]:
    """Return the defaults that differ from those of `Settings` for a command."""
    return {
        name: declared.option.defaults[command]
        for name, declared in declarations(Settings).items()
        if command in declared.option.defaults
    }
