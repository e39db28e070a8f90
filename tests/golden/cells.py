"""The settings of the golden runs, one `Cell` each.

Together they cover every method, step size, update rule, combination rule, model
family, partition and engine. All costs are simulated, except in `local-measured`.
"""

from golden import own
from golden.cell import Cell, settings

DEFAULT = settings("softmax", "digits", "case:1")
SPEEDS = (4.0, 4.0, 1.0, 1.0, 1.0)
ABSENT = settings(
    "softmax",
    "digits",
    "case:2",
    participation=0.5,
    compress="8-bit",
    batch_size=20,
    tau_max=8,
)
FIXED = settings(
    "softmax",
    "digits",
    "dirichlet:0.3",
    method="frugal",
    drift_correction=False,
    tau=5,
    step_size=0.1,
    rounds=6,
    nodes=4,
    budget="time=1h",
)
ROBUST = settings("softmax", "digits", "case:1", nodes=8, attackers=2)
NODE_PRIVATE = settings(
    "softmax", "digits", "case:1", nodes=20, budget=("time=4s", "privacy=4")
)
SAMPLE_PRIVATE = settings(
    "softmax",
    "digits",
    "case:1",
    privacy_unit="sample",
    budget=("time=3s", "privacy=4"),
)
OWN_RULES = settings("svm", "digits", "case:2", nodes=3, rounds=7, budget="time=1h")
IMAGES = {"nodes": 3, "rounds": 3, "batch_size": 20, "budget": "time=1h"}
FILES = {"model": "softmax", "budget": "time=4s", "tau_max": 6, "seed": 3}
NETWORK = settings("softmax", "digits", "case:2", nodes=3, rounds=8, budget="time=8s")
RAY = settings("svm", "digits", "case:2", nodes=11, rounds=8, budget="time=3s")
MODULE = settings(None, "digits", "case:1", nodes=3, tau=3, rounds=3, batch_size=30)
FLOWER = settings(
    "svm",
    "digits",
    "case:2",
    nodes=2,
    method="frugal",
    tau=4,
    rounds=5,
    seed=3,
    costs="simulated",
    budget="time=1000s",
)

NEWTON = settings(
    "softmax",
    "wine",
    "case:1",
    nodes=3,
    rounds=8,
    method="newton",
    combine="mean",
    costs="simulated",
    budget="time=60s",
)

METHODS = [
    Cell("accelerated-softmax-case1", DEFAULT, quick=True),
    Cell("accelerated-svm-case2", settings("svm", "digits", "case:2"), quick=True),
    Cell(
        "accelerated-linear-dirichlet",
        settings("linear", "diabetes", "dirichlet:0.5", seed=1),
        quick=True,
    ),
    Cell(
        "accelerated-kmeans-case4",
        settings("kmeans", "wine", "case:4", clusters=3),
        quick=True,
    ),
    Cell("accelerated-full-batch", {**DEFAULT, "batch_size": "full", "seed": 2}),
    Cell(
        "frugal-softmax-case4",
        settings("softmax", "digits", "case:4", method="frugal"),
        quick=True,
    ),
    Cell("newton-softmax", NEWTON, quick=True),
    Cell(
        "newton-linear",
        settings("linear", "diabetes", "dirichlet:0.5", seed=1, method="newton"),
        quick=True,
    ),
    Cell("frugal-svm-case3", settings("svm", "breast-cancer", "case:3", method="frugal")),
    Cell("frugal-kmeans-case1", settings("kmeans", "wine", "case:1", method="frugal")),
    Cell(
        "frugal-drift-not-corrected",
        settings(
            "softmax",
            "digits",
            "case:2",
            method="frugal",
            drift_correction=False,
            delta="gradient",
        ),
    ),
    Cell(
        "paper-svm-case2",
        settings("svm", "digits", "case:2", method="paper"),
        quick=True,
    ),
    Cell(
        "paper-softmax-full-batch",
        settings("softmax", "breast-cancer", "case:4", method="paper", batch_size="full"),
    ),
    Cell(
        "paper-drift-corrected",
        settings(
            "linear",
            "diabetes",
            "case:2",
            method="paper",
            drift_correction=True,
            step_size="auto",
        ),
    ),
    Cell(
        "paper-control-parameters",
        settings(
            "svm",
            "digits",
            "case:1",
            method="paper",
            phi=0.1,
            gamma=3.0,
            tau_max=9,
            aggregation_factor=2.0,
        ),
    ),
    Cell(
        "centralized-svm",
        settings("svm", "digits", None, method="centralized", step_size=0.05),
        quick=True,
    ),
    Cell(
        "centralized-mini-batches",
        settings("softmax", "wine", None, method="centralized", batch_size=8, rounds=40),
    ),
    Cell(
        "asynchronous-svm",
        settings("svm", "digits", "case:2", method="asynchronous", speeds=SPEEDS),
        quick=True,
    ),
    Cell(
        "asynchronous-mini-batches",
        settings("softmax", "digits", "case:1", method="asynchronous", batch_size=8),
    ),
]

MODELS_AND_DATA = [
    Cell(
        "mlp-labels",
        settings("mlp", "digits", "labels:2", nodes=10, budget="time=2s"),
        needs=("torch",),
        quick=True,
    ),
    Cell("cnn", {**IMAGES, "model": "cnn", "tau": 2}, own.large_digits, needs=("torch",)),
    Cell("lenet", {**IMAGES, "model": "lenet"}, own.large_digits, needs=("torch",)),
    Cell(
        "function-model",
        {"budget": ("time=6s", "bytes=60kB", "money=0.4")},
        own.hospitals,
        quick=True,
    ),
    Cell("torch-module", MODULE, own.torch_module, needs=("torch",), quick=True),
    Cell("torch-module-file", MODULE, own.model_file, needs=("torch",)),
    Cell("draw-200-nodes", settings("svm", "digits", "draw:30", nodes=200, rounds=5)),
    Cell("node-files", FILES, own.node_files),
    Cell(
        "csv-table",
        {
            "target": "kind",
            "drop": ("number",),
            "categorical": ("colour",),
            "impute": "median",
            "budget": "time=2s",
            "nodes": 3,
        },
        own.csv_table,
    ),
    Cell(
        "sampled-data",
        settings(
            "softmax",
            "digits",
            "dirichlet:0.2",
            train_samples=500,
            test_samples=100,
            test_share=0.3,
            seed=4,
        ),
    ),
]

OPTIONS = [
    Cell(
        "speeds-shared-work",
        settings("softmax", "digits", "case:2", speeds=SPEEDS),
        quick=True,
    ),
    Cell(
        "speeds-equal-work",
        settings("softmax", "digits", "case:2", speeds=SPEEDS, workload="equal"),
    ),
    Cell(
        "speeds-drawn",
        settings("svm", "digits", "case:1", speeds="lognormal:1.0", participation=0.8),
    ),
    Cell("work-by-data", {**FIXED, "workload": "by-data"}),
    Cell("proximal", {**FIXED, "proximal": 0.3}),
    Cell("step-fall", {**FIXED, "step_fall": 0.5, "budget": "time=2s", "rounds": 30}),
    Cell("update-average", {**DEFAULT, "update": "average"}),
    Cell("update-accelerate", {**DEFAULT, "update": "accelerate", "server_momentum": 0.5}),
    Cell("update-fedavgm", {**FIXED, "update": "fedavgm"}),
    Cell("update-fedadam", {**FIXED, "update": "fedadam"}, quick=True),
    Cell("update-fedyogi", {**FIXED, "update": "fedyogi", "server_epsilon": 0.01}),
    Cell("combine-mean-noise", {**ROBUST, "combine": "mean", "attack": "noise"}),
    Cell("combine-clipped-scale", {**ROBUST, "combine": "clipped", "attack": "scale"}),
    Cell(
        "combine-trimmed-sign-flip",
        {**ROBUST, "combine": "trimmed", "attack": "sign-flip"},
        quick=True,
    ),
    Cell(
        "combine-median-label-flip",
        {**ROBUST, "combine": "median", "attack": "label-flip"},
    ),
    Cell("participation-8-bit", ABSENT, quick=True),
    Cell("16-bit", settings("svm", "digits", "case:2", method="paper", compress="16-bit")),
    Cell(
        "auto-bits-several-budgets",
        settings(
            "softmax",
            "digits",
            "case:2",
            compress="auto",
            budget=("time=5s", "bytes=300kB", "energy=1kJ", "cpu=30s"),
        ),
    ),
    Cell(
        "until-best-on-test",
        settings(
            "softmax",
            "digits",
            "case:2",
            until=("accuracy=0.93", "loss=0.01"),
            keep="best-on-test",
            budget="time=20s",
        ),
    ),
    Cell(
        "patience",
        settings("svm", "digits", "case:2", tau=5, patience=10, budget="time=200s"),
    ),
    Cell(
        "validation-participation",
        {**NETWORK, "nodes": 4, "participation": 0.5, "rounds": 30, "validation": 0.15},
        quick=True,
    ),
    Cell(
        "validation-second-stage",
        settings("mlp", "digits", "case:1", validation=0.15, budget="time=60s"),
        needs=("torch",),
    ),
    Cell("node-privacy", NODE_PRIVATE, needs=("dp_accounting",), quick=True),
    Cell(
        "node-privacy-absent",
        {**NODE_PRIVATE, "nodes": 12, "participation": 0.5, "rounds": 5},
        needs=("dp_accounting",),
    ),
    Cell("sample-privacy", SAMPLE_PRIVATE, needs=("dp_accounting",), quick=True),
    Cell(
        "sample-privacy-batches",
        {**SAMPLE_PRIVATE, "batch_size": 40, "rounds": 6},
        needs=("dp_accounting",),
    ),
    Cell("own-controller", OWN_RULES, own.own_controller),
    Cell("own-step-size", OWN_RULES, own.own_step_size),
    Cell("own-update", OWN_RULES, own.own_update),
    Cell("own-combination", OWN_RULES, own.own_combination),
    Cell("own-rules", OWN_RULES, own.own_rules, quick=True),
    Cell(
        "library-rules",
        {**OWN_RULES, "budget": "time=4s", "rounds": 60},
        own.library_rules,
    ),
]

RESUMED = [
    Cell(
        "interrupted-accelerated",
        DEFAULT,
        how="interrupted",
        same_as="accelerated-softmax-case1",
    ),
    Cell("interrupted-8-bit", ABSENT, how="interrupted", same_as="participation-8-bit"),
    Cell(
        "interrupted-private",
        {**NODE_PRIVATE, "evaluations": 1},
        how="interrupted",
        same_w_as="node-privacy",
        needs=("dp_accounting",),
    ),
    Cell("interrupted-newton", NEWTON, how="interrupted", same_as="newton-softmax"),
    Cell("extended-newton", {**NEWTON, "rounds": None}, how="extended", more=("time=+1s",)),
    Cell("extended-accelerated", DEFAULT, how="extended", more=("time=+1s",)),
    Cell(
        "extended-paper",
        settings("svm", "digits", "case:2", method="paper"),
        how="extended",
        more=("time=+1s",),
    ),
]

ENGINES = [
    Cell(
        "command-run",
        DEFAULT,
        how="run",
        same_as="accelerated-softmax-case1",
        quick=True,
    ),
    Cell("network-reference", NETWORK),
    Cell(
        "network",
        {**NETWORK, "engine": "network"},
        same_as="network-reference",
        needs=("grpc",),
        quick=True,
    ),
    Cell(
        "network-own-rules",
        {**OWN_RULES, "engine": "network"},
        own.own_rules,
        same_as="own-rules",
        needs=("grpc",),
    ),
    Cell(
        "local-8-bit",
        {**NETWORK, "compress": "8-bit", "costs": "simulated"},
        how="local",
        needs=("grpc",),
    ),
    Cell(
        "local-participation",
        {**NETWORK, "nodes": 4, "participation": 0.5, "costs": "simulated"},
        how="local",
        needs=("grpc",),
    ),
    Cell(
        "local-measured",
        {**FIXED, "compress": "none", "costs": "measured"},
        how="local",
        needs=("grpc",),
        measured=True,
    ),
    Cell(
        "local-secure-aggregation",
        {**NETWORK, "secure_aggregation": True, "costs": "simulated"},
        how="local",
        needs=("grpc", "cryptography"),
    ),
    Cell(
        "serve-join",
        {**FILES, "costs": "simulated", "nodes": 3},
        how="serve",
        needs=("grpc",),
    ),
    Cell(
        "serve-killed-and-resumed",
        {**FILES, "costs": "simulated", "nodes": 3},
        how="killed",
        same_as="serve-join",
        needs=("grpc",),
    ),
    Cell("ray-reference", RAY),
    Cell(
        "ray",
        {**RAY, "engine": "ray", "actors": 2},
        same_as="ray-reference",
        needs=("ray",),
    ),
    Cell(
        "ray-own-rules",
        {**OWN_RULES, "engine": "ray", "actors": 2},
        own.own_rules,
        same_as="own-rules",
        needs=("ray",),
    ),
    Cell(
        "ray-torch-module",
        {**MODULE, "engine": "ray", "actors": 2},
        own.torch_module,
        same_as="torch-module",
        needs=("ray", "torch"),
    ),
    Cell(
        "network-newton",
        {**NEWTON, "engine": "network"},
        same_as="newton-softmax",
        needs=("grpc",),
    ),
    Cell(
        "ray-newton",
        {**NEWTON, "engine": "ray", "actors": 2},
        same_as="newton-softmax",
        needs=("ray",),
    ),
    Cell("flower-reference", FLOWER),
    Cell("flower", FLOWER, how="flower", same_w_as="flower-reference", needs=("flwr",)),
]

CELLS = [*METHODS, *MODELS_AND_DATA, *OPTIONS, *RESUMED, *ENGINES]
