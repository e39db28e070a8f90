"""The settings of a run: all that is needed to repeat it, each declared once.

The command line, TOML files, `fedbudget.train` and Flower's run-config are made from the fields of `Settings`: an
option `--step-size` is the key `step-size` in a file and the argument `step_size` in Python. A new field, with its line
in `SettingsOptions` (setting_types.py), is there in all of them. Values are checked when settings are made, each for
itself by its type, and then together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import tomli_w

from fedbudget import tasks
from fedbudget.errors import UserError, key, unknown
from fedbudget.settings.compatibility import FEDERATED as FEDERATED
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
    MethodName,
    Most,
    Names,
    NoiseName,
    PrivacyUnit,
    Seed,
    SettingsOptions,
    Share,
    Tau,
    UpdateName,
    WorkloadName,
)

if TYPE_CHECKING:
    from fedbudget.budget.budget import Budget
    from fedbudget.data.tables import TableOptions
    from fedbudget.evaluation.targets import MetricTarget

MODELS = ("svm", "linear", "kmeans", "softmax", "mlp", "cnn", "lenet")
SMALL_DATASETS = ("breast-cancer", "diabetes", "wine", "mnist-small", "fashion-mnist-small")
DATASETS = (
    "digits",
    "mnist",
    "fashion-mnist",
    "cifar-10",
    "energy",
    "user-knowledge",
    *SMALL_DATASETS,
)
"""Names, known without loading what they are the names of."""


_RUN = ("run",)
_COMPARE = ("run", "compare")
_NETWORK = ("serve", "local")
_ONE_RUN = ("run", "serve", "local")
_DATA = (*_ONE_RUN, "compare", "join")


@dataclass(frozen=True)
class Settings:
    """What to train, on what, with which budget, and how.

    What a field means is said where it is declared, and by `fedbudget run --help`. Where None is the default, what is
    taken instead depends on the other settings and on the data.
    """

    COMMANDS: ClassVar = ("run", "serve", "local", "compare")

    model: str | None = option(
        None,
        f"What is trained: {', '.join(MODELS)}, or your own: a Python file and a name in it, net.py:Net.",
        "most used",
        (*COMMANDS, "join"),
        shown="softmax for classes, linear for numbers",
        values=MODELS,
        helps={
            "join": "What may be trained, such as your own model: a Python file and a name in it, net.py:Net."
        },
    )
    dataset: str = option(
        "digits",
        f"{', '.join(DATASETS)}, or a path: a .csv, a .npz, or a folder with one per node.",
        "most used",
        _DATA,
        values=lambda start: [*DATASETS, *paths_from(start, ".csv", ".npz")],
    )
    data_dir: str | None = option(
        None,
        "Where datasets are looked for first.",
        "data",
        (*_DATA, "sweep", "reproduce", "evaluate"),
        shown="FEDBUDGET_DATA, then the cache folder",
    )
    target: str | None = option(
        None, "The CSV column to predict.", "data", (*_DATA, "evaluate"), shown="the last"
    )
    drop: Names | None = option(
        None,
        "CSV columns to leave out: id,date.",
        "data",
        (*_DATA, "evaluate"),
        commas=True,
    )
    categorical: Names | None = option(
        None,
        "CSV columns that are categories.",
        "data",
        _DATA,
        shown="text with few different values",
        commas=True,
    )
    impute: Impute | None = option(
        None,
        "What missing cells of a CSV get: mean, median or most-frequent; in categories always the most frequent.",
        "data",
        _DATA,
        shown="they are refused",
    )
    classes: Names | None = option(
        None,
        "All classes that there are, in order: well,ill.",
        "data",
        _DATA,
        shown="those found",
        commas=True,
    )
    standardise: bool | None = option(
        None,
        "Bring features to mean 0 and deviation 1.",
        "data",
        _DATA,
        shown="those of a CSV",
    )
    test_share: Fraction = option(
        0.2, "Held out for testing; of a node's --data, only if given.", "data", _DATA
    )
    train_samples: Count | None = option(
        None, "Train on only so many samples, others for each seed.", "data", _DATA
    )
    test_samples: Count | None = option(
        None,
        "Test on only so many samples, others for each seed.",
        "data",
        (*_COMPARE, "local"),
    )
    nodes: Count | None = option(
        None,
        "How many nodes.",
        "most used",
        shown="5, or one per file",
        defaults={"local": 5},
        helps={
            "serve": "How many nodes to wait for before the first round.  [default: --min-nodes]",
            "local": "How many node processes to start.  [default: 5]",
        },
    )
    partition: str | None = option(
        None,
        "How data is spread: case:N, dirichlet:ALPHA, labels:K of each node, draw:SAMPLES or files.",
        "data",
        _DATA,
        shown="case:1, or files for a folder",
        helps={
            "compare": "With --rivals, in place of --cases: case:N, dirichlet:ALPHA, labels:K, draw:N or files."
        },
    )
    method: MethodName = option(
        "accelerated",
        "accelerated (drift corrected, goes on where rounds agree on the way), frugal (drift corrected, τ by the "
        "paper's bound), paper (to the letter), or a baseline: centralized or asynchronous gradient descent.",
        "most used",
    )
    drift_correction: bool | None = option(
        None, "Correct local updates for drift.", "method", shown="as the method has it"
    )
    delta: Delta | None = option(
        None,
        "Estimate δ from parameters or gradient.",
        "method",
        shown="as the method has it",
    )
    tau: Tau = option(
        "adaptive",
        "adaptive, or a fixed number of local updates per round (τ).",
        "method",
        _ONE_RUN,
    )
    budget: tuple[str, ...] = option(
        ("time=15s",),
        "What may be spent, once for each resource: time=15s, energy=500J, bytes=20MB, cpu=30s, money=0.40, privacy=4.",
        "most used",
    )
    privacy_delta: Chance | None = option(
        None, "δ of a privacy budget.", "budget", shown="1e-5, below 1/nodes²"
    )
    privacy_noise: NoiseName | None = option(
        None,
        "Where a privacy budget's noise is from: secret (this machine's own) or seeded (a run that can be repeated).",
        "budget",
        _COMPARE,
        shown="secret; simulated, seeded",
    )
    privacy_unit: PrivacyUnit | None = option(
        None,
        "What a privacy budget protects: node (with all its samples) or sample (each).",
        "budget",
        shown="node",
    )
    costs: CostSource = option(
        "simulated",
        "simulated (the paper's prototype) or measured (clocks and meters of the machines).",
        "budget",
        defaults=dict.fromkeys(("serve", "local", "flower"), "measured"),
    )
    aggregation_factor: Positive = option(
        1.0,
        "How many times as long as the prototype's a simulated aggregation takes.",
        "budget",
        _COMPARE,
    )
    speeds: tuple[float, ...] | str | None = option(
        None,
        "How fast each simulated node makes local updates: 4,4,1,1,1, or drawn, lognormal:1.0.",
        "budget",
        (*_COMPARE, *_NETWORK),
        shown="all alike; with asynchronous two of five are fast",
    )
    workload: WorkloadName | None = option(
        None,
        "by-speed: where time is scarce, faster nodes make more local updates; equal: all make τ; by-data: in "
        "proportion to its samples, τ at the node with the most, and all count alike (FedNova; simulated nodes).",
        "method",
        shown="by-speed where τ is adaptive and drift corrected",
    )
    participation: Chance = option(
        1.0, "The chance of a node to be asked in a round.", "method"
    )
    attack: AttackName | None = option(
        None,
        "What some nodes do to the run: sign-flip, scale, noise or label-flip.",
        "method",
        _RUN,
        shown="nothing",
    )
    attackers: Count | None = option(
        None, "How many nodes attack.", "method", _RUN, shown="1"
    )
    batch_size: BatchSize | None = option(
        None, "Samples in a mini-batch, or full.", "method", shown="100"
    )
    step_size: Eta | None = option(
        None, "Step size η, or auto.", "method", shown="auto, or 0.01 with paper"
    )
    step_fall: Share | None = option(
        None,
        "The share of the budget, at its end, over which a step size that is a number falls.",
        "method",
        shown="0",
    )
    update: UpdateName | None = option(
        None,
        "How the nodes' mean moves the model: average, accelerate, or a published rule.",
        "method",
        shown="accelerate with method accelerated, else average",
    )
    combine: CombineName | None = option(
        None,
        "How updates become one: mean, clipped, trimmed or median.",
        "method",
        shown="mean; with serve clipped",
    )
    server_step_size: Positive | None = option(
        None,
        "How far --update moves.",
        "method",
        shown="1 with fedavgm, 0.1 with fedadam and fedyogi",
    )
    server_momentum: Fraction | None = option(
        None,
        "β of fedavgm, β₁ of fedadam and fedyogi.",
        "method",
        shown="0.9, and 0.8 with accelerate",
    )
    server_beta2: Fraction | None = option(
        None, "β₂ of fedadam and fedyogi.", "method", shown="0.99"
    )
    server_epsilon: Positive | None = option(
        None, "ε of fedadam and fedyogi; larger is less adaptive.", "method", shown="0.001"
    )
    proximal: Positive | None = option(
        None, "μ of FedProx, which holds updates near their start.", "method", shown="0"
    )
    phi: Positive | None = option(
        None,
        "Control parameter φ; larger gives smaller τ.",
        "method",
        shown="0.0025 with drift correction; else 0.025, or 5e-5 for cnn",
    )
    gamma: Gamma = option(10.0, "How many times the last τ the next may be.", "method")
    tau_max: Count = option(100, "The largest τ.", "method")
    seed: Seed = option(0, "Of everything random.", "method", (*_ONE_RUN, "join"))
    rounds: Count | None = option(
        None, "The most rounds to make, besides the budget.", "budget", _ONE_RUN
    )
    until: tuple[str, ...] | None = option(
        None,
        "End before the budget is spent, when a metric is there: accuracy=0.95 (or more, on test samples), loss=0.3 "
        "(or less, on training samples), or a model's own on test samples; may be repeated: any one ends the run.",
        "budget",
        _ONE_RUN,
    )
    patience: Count | None = option(
        None,
        "End when so many rounds were on average not 1 % better than as many before them: in accuracy where --until "
        "has it, else in loss. Because of noise, take 20 or more.",
        "budget",
        _ONE_RUN,
        shown="the budget is spent",
    )
    keep: Keep = option(
        "best-loss",
        "Which parameters are the result: best-loss (on training samples), or best-on-test, of those that were looked "
        "at; then the accuracy that is told is somewhat too good, because it was chosen by.",
        "output",
        _ONE_RUN,
    )
    evaluations: Count = option(
        50,
        "At how many points of a run, at most, test samples are looked at; four times as many with --until or --keep "
        "best-on-test.",
        "output",
        _ONE_RUN,
    )
    clusters: Count = option(4, "Clusters of kmeans.", "model")
    device: str = option(
        "auto",
        "Where PyTorch computes: auto, cpu, cuda.",
        "model",
        _DATA,
        values=("auto", "cpu", "cuda"),
    )
    min_nodes: Count | None = option(
        None, "The fewest nodes to make a round with.", "network", _NETWORK, shown="1"
    )
    round_timeout: Positive | None = option(
        None,
        "Seconds until nodes that have not reported are left out of a round.",
        "network",
        _NETWORK,
        shown="from what rounds took",
    )
    compress: Compression | None = option(
        None,
        "How parameters are sent: none, 16-bit, 8-bit, or auto.",
        "network",
        shown="auto; simulated, none",
    )
    max_share: Chance | None = option(
        None,
        "The most of the average that one node may be.",
        "network",
        _NETWORK,
        shown="0.5, of three or more",
    )
    secure_aggregation: bool | None = option(
        None, "Mask reports: only their sum can be read.", "network", _NETWORK
    )
    secure_threshold: Most | None = option(
        None, "Share of a group that opens a sum.", "network", _NETWORK, shown="2/3"
    )
    watts: NotNegative = option(5.0, "Power of a node, for energy.", "budget")
    joules_per_byte: NotNegative = option(
        1e-6, "Energy of sending a byte.", "budget", shown="1e-6"
    )
    price_per_hour: NotNegative = option(0.1, "Of a node, for money.", "budget")
    price_per_gigabyte: NotNegative = option(0.1, "Of sending, for money.", "budget")

    def __post_init__(self) -> None:
        for name, declared in declarations(Settings).items():
            if (value := getattr(self, name)) is not declared.default:
                object.__setattr__(self, name, declared.converted(value))
        self.limits()
        self.targets()
        require_compatible(self)

    def limits(self) -> "Budget":
        from fedbudget.budget.budget import Budget

        return Budget.parse(self.budget)

    def table_options(self) -> "TableOptions":
        """What is said of tables."""
        from fedbudget.data.tables import TableOptions

        return TableOptions(
            self.target, self.drop or (), self.categorical or (), self.impute, self.classes
        )

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
        defaults: Mapping[str, Any] | None = None,
    ) -> "Settings":
        """Settings from what was given and, below that, from a task or a file, and below that, from defaults.

        Args:
          given: by the names of fields.
          case: short for the partition `case:N`.
          defaults: where they are not those of `Settings`.
        """
        if task is not None and config is not None:
            raise UserError(
                "give `task` or `config`, not both; fedbudget tasks NAME prints a task's settings as a file"
            )
        if case is not None:
            if "partition" in given:
                raise UserError("give `case` or `partition`, not both")
            given = {**given, "partition": f"case:{case}"}
        file = tasks.path(task) if task is not None else config
        return cls(
            **{**(defaults or {}), **({} if file is None else cls.from_toml(file)), **given}
        )

    @classmethod
    def from_python(
        cls,
        *,
        command: str = "run",
        task: str | None = None,
        config: Path | None = None,
        case: int | None = None,
        model: str | None = None,
        dataset: str | None = None,
        budget: str | Sequence[str] | None = None,
        until: str | Sequence[str] | None = None,
        step_size: float | str | None = None,
        update: str | None = None,
        **options: Unpack[SettingsOptions],
    ) -> "Settings":
        """Settings from the arguments of `fedbudget.train`, or of the function that does what a command does."""
        for name in options:
            if name not in declarations(Settings):
                raise unknown("argument", name, [*declarations(Settings), "task", "case"])
        more = {
            "model": model,
            "dataset": dataset,
            "budget": budget,
            "until": until,
            "step_size": step_size,
        }
        given = {
            name: value
            for name, value in {**more, "update": update}.items()
            if value is not None
        }
        defaults = defaults_of(command)
        return cls.combined(
            {**options, **given}, task=task, config=config, case=case, defaults=defaults
        )

    @classmethod
    def from_toml(cls, path: Path) -> dict[str, Any]:
        """The settings in a file, checked key by key, to be completed by others."""
        return read_settings(read_toml(path), str(path))

    def to_toml(self) -> str:
        return tomli_w.dumps(
            {key(name): value for name, value in vars(self).items() if value is not None}
        )


def read_settings(
    values: Mapping[str, Any], where: str, also: Iterable[str] = ()
) -> dict[str, Any]:
    """The settings among the keys of a file, as fields; errors speak of keys, and say where they are.

    Args:
      where: the file, or the part of one.
      also: other keys that there may be, which are left to the caller.
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
    """Refuses a key that is neither a setting's nor one of `also`."""
    known = [*map(key, declarations(Settings)), *also]
    for name in names:
        if name not in known:
            raise UserError(
                f"{where}: {unknown('key', name, known, 'known are ' + ', '.join(known))}"
            )


def defaults_of(command: str) -> dict[str, Any]:
    """What a command takes where nothing is given, where that is not the field's default."""
    by_name = {
        name: declared.option.defaults for name, declared in declarations(Settings).items()
    }
    return {
        name: defaults[command] for name, defaults in by_name.items() if command in defaults
    }
