"""Which options work together: one table of conflicts, checked before a run reads data.

A row of `CONFLICTS` names options, a condition on each, the reason, and what to do instead.
`require_compatible` reports all rows whose conditions hold. A row is checked only if all of
its options are known: `Settings` checks those between settings, and each command adds its
own options, such as `engine`. docs/compatibility.py renders the table.

Conflicts that depend on samples, on a model or on an object passed from Python are not in
the table; the code that reads these raises them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from fedbudget.errors import UserError
from fedbudget.secure.graph import FEWEST
from fedbudget.settings.option import choices_text

ADAPTIVE = ("accelerated", "frugal")
BASELINES = ("centralized", "asynchronous")
"""Methods with an automatic step size and drift correction by default."""

DEFAULT_NODES = 5

Predicate = Callable[[Any], bool]
"""Function of all known options, as attributes; `budget` and `until` are parsed."""


@dataclass(frozen=True)
class Condition:
    """A condition on the value of one option.

    Args:
      words: the values for which it holds.
      holds: whether it holds.
    """

    option: str
    words: str
    holds: Predicate


@dataclass(frozen=True)
class Conflict:
    """Options that do not work together while all conditions hold.

    Args:
      reason: why, with the names of options in backticks and values in braces.
      instead: what to do.
    """

    conditions: tuple[Condition, ...]
    reason: str
    instead: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(each.option for each in self.conditions)

    def applies(self, chosen: SimpleNamespace) -> bool:
        known = all(hasattr(chosen, option) for option in self.options)
        return known and all(each.holds(chosen) for each in self.conditions)

    def message(self, **values: Any) -> str:
        return "; ".join(filter(None, (self.reason, self.instead))).format_map(values)


def require_compatible(settings: Any = None, **others: Any) -> None:
    """Raise UserError with one line for each conflict between options.

    Args:
      settings: settings of the run, if they are complete.
      others: options that are not settings; `engine` may also be `flower`.
    """
    chosen = chosen_options(settings, **others)
    messages = [each.message(**vars(chosen)) for each in CONFLICTS if each.applies(chosen)]
    if messages:
        raise UserError("\n".join(dict.fromkeys(messages)))


def chosen_options(settings: Any = None, **others: Any) -> SimpleNamespace:
    """Return all known options, and `rule`, the name of the update rule in use."""
    chosen = SimpleNamespace()
    if settings is not None:
        vars(chosen).update(vars(settings))
        chosen.budget = settings.limits()
        chosen.until = settings.targets()
        chosen.rule = update_rule(settings, private=_private(chosen))
    vars(chosen).update(others)
    return chosen


def update_rule(settings: Any, *, private: bool) -> str:
    """Return the name of the update rule, also if the method chooses it."""
    if settings.update is not None:
        return str(settings.update)
    if private and settings.secure_aggregation and settings.privacy_unit == "sample":
        return "fedavgm"  # updates cost rounds, and momentum needs fewer of them
    # K-means has no momentum: a centre may have other samples in the next round.
    momentum = settings.method == "accelerated" and settings.model != "kmeans"
    plain = private or settings.local_step is not None
    return "accelerate" if momentum and not plain else "average"


def automatic_step(settings: Any) -> bool:
    """Return whether the step size adapts by itself."""
    if settings.step_size is None:
        return settings.method in ADAPTIVE and settings.local_step is None
    return bool(settings.step_size == "auto")


def validates(settings: Any) -> bool:
    """Return whether nodes hold out rows by default."""
    choose = (*ADAPTIVE, "newton")
    return settings.method in choose and settings.limits().by_noise is None


def corrects_drift(settings: Any) -> bool:
    """Return whether the method corrects drift by default."""
    return not any(each.holds(settings) for each in _WITHOUT_DRIFT_CORRECTION)


def needs_descent(settings: Any, *, network: bool) -> str | None:
    """Return why a run of the default method cannot use Newton's method, or None.

    Args:
      settings: the settings.
      network: whether nodes are on other machines.
    """
    chosen = chosen_options(settings, engine="network" if network else "in-process")
    if _private(chosen):
        return "the run is private"
    for conflict in _ONLY_DESCENT:
        if conflict.applies(chosen):
            option = conflict.options[0]
            value = getattr(chosen, option)
            return f"{option} is {'not given' if value is None else value}"
    return None


def _private(chosen: Any) -> bool:
    return chosen.budget.by_noise is not None


def _estimates(chosen: Any) -> bool:
    return not _private(chosen) and (chosen.tau == "adaptive" or automatic_step(chosen))


def _given(option: str) -> Condition:
    return Condition(option, "given", lambda chosen: getattr(chosen, option) is not None)


def _missing(option: str) -> Condition:
    return Condition(option, "not given", lambda chosen: getattr(chosen, option) is None)


def _on(option: str, words: str = "on") -> Condition:
    return Condition(option, words, lambda chosen: bool(getattr(chosen, option)))


def _off(option: str) -> Condition:
    return Condition(option, "off", lambda chosen: not getattr(chosen, option))


def _is(option: str, *values: Any) -> Condition:
    words = choices_text(list(map(str, values)))
    return Condition(option, words, lambda chosen: getattr(chosen, option) in values)


def _is_not(option: str, *values: Any) -> Condition:
    words = choices_text([str(value) for value in values if value is not None])
    return Condition(
        option,
        f"other than {words}",
        lambda chosen: getattr(chosen, option) not in values,
    )


_BASELINE = _is("method", "centralized", "asynchronous")
_PRIVATE = Condition("budget", "with privacy", _private)
_NOT_PRIVATE = Condition("budget", "without privacy", lambda chosen: not _private(chosen))
_PER_SAMPLE = _is("privacy_unit", "sample")
_SECURE = _on("secure_aggregation")
_REMOTE = _is("engine", "network", "flower")
_NOT_IN_PROCESS = _is_not("engine", "in-process")
_FALLING = _on("step_fall", "above 0")
_COMPRESSED = _is_not("compress", None, "none")
_OWN_METHOD = _is_not("method", *ADAPTIVE)
_NEWTON = _is("method", "newton")
_AUTOMATIC_STEP = Condition(
    "step_size", "auto, the default of methods accelerated and frugal", automatic_step
)
_OWN_STEPS = _given("local_step")


def _unless_drift_is_corrected(condition: Condition) -> Condition:
    """Limit a condition to runs whose `drift_correction` follows from other options."""
    return Condition(
        condition.option,
        f"{condition.words}, without `drift_correction`",
        lambda chosen: chosen.drift_correction is None and condition.holds(chosen),
    )


_WITHOUT_DRIFT_CORRECTION = (
    Condition("drift_correction", "off", lambda chosen: chosen.drift_correction is False),
    _OWN_METHOD,
    _unless_drift_is_corrected(_is_not("update", None, "average")),
    _unless_drift_is_corrected(_is("combine", "trimmed", "median")),
    _unless_drift_is_corrected(_given("proximal")),
    _unless_drift_is_corrected(_OWN_STEPS),
)
"""Conditions without which a run corrects drift; `proximal` already limits drift."""


def _baselines() -> Iterator[Conflict]:
    missing = (
        _on("drift_correction"),
        _given("delta"),
        _is_not("participation", 1),
        _COMPRESSED,
        _given("update"),
        _given("combine"),
        _given("attack"),
        _FALLING,
        _given("proximal"),
        _OWN_STEPS,
    )
    for each in missing:
        yield Conflict(
            (_BASELINE, each),
            f"`method` {{method}} has no `{each.option}`",
            "use `method` accelerated, frugal or paper",
        )
    yield Conflict(
        (_BASELINE, _is("step_size", "auto")),
        "`method` {method} needs a `step_size` that is a number",
    )
    yield Conflict(
        (_is("method", "centralized"), _given("speeds")),
        "`method` centralized has no nodes and cannot use `speeds`",
    )
    yield Conflict(
        (_BASELINE, _NOT_IN_PROCESS),
        "`method` {method} does not work with engine {engine}",
        "use `method` accelerated, frugal or paper",
    )
    yield Conflict(
        (_BASELINE, _on("rivals")),
        "`method` {method} has no `rivals`",
        "use `method` accelerated, frugal or paper",
    )


def _of_methods() -> Iterator[Conflict]:
    yield Conflict(
        (_FALLING, _AUTOMATIC_STEP),
        "`step_fall` needs a `step_size` that is a number; the automatic one decreases by "
        "itself",
    )
    unused = {
        "server_step_size": ("average", "accelerate", "fedexp", "prodigy"),
        "server_momentum": ("average", "fedexp"),
        "server_beta2": ("average", "accelerate", "fedavgm", "fedexp"),
        "server_epsilon": ("average", "accelerate", "fedavgm"),
    }
    for option, rules in unused.items():
        words = f"{choices_text(rules)}, also by default"
        without = Condition("update", words, _is("rule", *rules).holds)
        yield Conflict(
            (_given(option), without),
            f"`{option}` has no effect with `update` {{rule}}",
            "set `update`, which otherwise follows from `method`, `model`, `budget` and "
            "`local_step`",
        )
    yield Conflict(
        (_on("drift_correction"), _is("combine", "trimmed", "median")),
        "drift correction requires that reports are averaged, which `combine` {combine} "
        "does not",
        "switch `drift_correction` off",
    )
    yield Conflict(
        (_is("workload", "by-speed"), _is_not("tau", "adaptive")),
        "`workload` by-speed needs `tau` adaptive",
    )
    for each in _WITHOUT_DRIFT_CORRECTION:
        yield Conflict(
            (_is("workload", "by-speed"), each),
            "`workload` by-speed needs drift correction, which is off with "
            f"`{each.option}` {{{each.option}}}",
            "use `method` accelerated or frugal without other rules",
        )
    yield Conflict(
        (_is("workload", "by-data"), _REMOTE),
        "`workload` by-data works only with simulated nodes, not with engine {engine}",
        "use fedbudget run in process or on Ray",
    )
    yield Conflict(
        (_given("class_weights"), _REMOTE),
        "`class_weights` does not work with engine {engine}",
        "use TorchModel(..., class_weights=...) in a file of your own",
    )
    yield Conflict(
        (_given("attack"), _NOT_IN_PROCESS),
        "`attack` needs engine in-process",
    )
    yield Conflict(
        (_given("speeds"), _is("costs", "measured")),
        "`speeds` need simulated `costs`; with measured costs, the real speeds count",
    )


def _of_local_steps() -> Iterator[Conflict]:
    added = (
        _on("drift_correction"),
        _given("proximal"),
        Condition("update", "accelerate", _is("rule", "accelerate").holds),
        _is("workload", "by-data"),
        _is("step_size", "auto"),
    )
    for each in added:
        yield Conflict(
            (_OWN_STEPS, each),
            f"`local_step` {{local_step}} does not work with `{each.option}` "
            f"{{{each.option}}}, which changes local updates too",
            "omit one of them",
        )
    yield Conflict(
        (_OWN_STEPS, _is("tau", "adaptive"), _is("method", "frugal", "paper")),
        "`method` {method} chooses `tau` from η, which `local_step` {local_step} replaces",
        "fix `tau`, or use `method` accelerated",
    )
    yield Conflict(
        (_SECURE, _is("local_step", "dog")),
        "`local_step` dog does not work with `secure_aggregation`, in which all nodes need "
        "the same starting point",
    )


def _only_descent() -> Iterator[Conflict]:
    """Yield what does not work with Newton's method, without the condition on `method`."""
    instead = "omit it, or use `method` accelerated"
    unused = (
        _given("update"),
        _given("step_size"),
        _given("drift_correction"),
        _given("delta"),
        _given("proximal"),
        _OWN_STEPS,
        _given("phi"),
        _given("workload"),
        _is_not("tau", "adaptive"),
        _FALLING,
    )
    for each in unused:
        yield Conflict((each,), f"`method` newton has no `{each.option}`", instead)
    yield Conflict(
        (_is_not("participation", 1),),
        "`method` newton compares losses of all nodes: `participation` must be 1",
        instead,
    )
    yield Conflict(
        (_COMPRESSED,),
        "`method` newton needs exact parameters: `compress` must be none",
        instead,
    )
    yield Conflict(
        (_SECURE,),
        "`method` newton does not work with `secure_aggregation`, in which nodes send only "
        "sums of their updates",
        instead,
    )
    yield Conflict(
        (_given("attack"),), "`attack` changes updates, which `method` newton has not"
    )
    yield Conflict(
        (_is_not("combine", None, "mean"),),
        "`method` newton adds up derivatives, and no rule limits the influence of a node: "
        "`combine` must be mean",
        instead,
    )
    yield Conflict(
        (_missing("combine"), _REMOTE),
        "`method` newton adds up derivatives, and with engine {engine} no rule limits the "
        "influence of a node",
        "set `combine` mean if you trust all nodes, or use `method` accelerated",
    )


_ONLY_DESCENT = tuple(_only_descent())


def _of_newton() -> Iterator[Conflict]:
    for each in _ONLY_DESCENT:
        yield Conflict((_NEWTON, *each.conditions), each.reason, each.instead)


def _of_data() -> Iterator[Conflict]:
    for option in ("target", "drop", "categorical", "impute", "missing", "classes"):
        yield Conflict(
            (_given("schema"), _given(option)),
            f"a `schema` replaces `{option}`",
            f"omit `{option}`, and change the file instead",
        )


def _of_privacy() -> Iterator[Conflict]:
    without = "omit it, or leave privacy out of `budget`"
    yield Conflict(
        (_PRIVATE, _is("class_weights", "balanced")),
        "`class_weights` balanced uses exact numbers of samples, which a `budget` of "
        "privacy does not cover",
        "give the weights as numbers",
    )
    yield Conflict(
        (_PRIVATE, _is_not("method", "accelerated")),
        "a `budget` of privacy has its own method: `method` must be accelerated",
    )
    need_reports = (
        _on("drift_correction"),
        _is_not("combine", None, "mean"),
        _COMPRESSED,
        _is_not("workload", None, "equal"),
        _given("patience"),
        _given("delta"),
        _given("phi"),
        _OWN_STEPS,
        _is("update", "fedexp"),
    )
    for each in need_reports:
        yield Conflict(
            (_PRIVATE, each),
            f"`{each.option}` needs data that nodes of a private run do not send",
            without,
        )
    for option, default in (("gamma", 10), ("tau_max", 100)):
        yield Conflict(
            (_PRIVATE, _is_not(option, default)),
            f"`{option}` has no effect in a private run, which plans τ itself",
            f"fix `tau`, {without}",
        )
    yield Conflict(
        (_PRIVATE, _is("rounds", 1)),
        "`rounds` 1 trains nothing: in the first private round, nodes only report the "
        "norms of their updates",
        "use 2 or more, or leave privacy out of `budget`",
    )
    targets_loss = Condition(
        "until",
        "with loss",
        lambda chosen: any(target.metric == "loss" for target in chosen.until),
    )
    yield Conflict(
        (_PRIVATE, targets_loss),
        "`until` loss does not work in a private run, in which nodes report no loss",
        without,
    )
    for option in ("privacy_delta", "privacy_noise", "privacy_unit", "privacy_ledger"):
        yield Conflict(
            (_given(option), _NOT_PRIVATE),
            f"`{option}` needs a `budget` of privacy, such as privacy=4",
        )
    yield Conflict(
        (_given("privacy_ledger"), _is("privacy_noise", "seeded")),
        "`privacy_ledger` counts results with secret noise; `privacy_noise` seeded hides "
        "nothing",
        "omit one of them",
    )
    yield Conflict(
        (_PER_SAMPLE, _given("proximal")),
        "`proximal` does not work with `privacy_unit` sample",
    )
    yield Conflict(
        (_PER_SAMPLE, _is("privacy_noise", "seeded"), _REMOTE),
        "with `privacy_unit` sample and engine {engine}, nodes add secret noise of their "
        "own: `privacy_noise` seeded is not possible",
    )
    of_a_node = (
        _given("privacy_account"),
        _is_not("privacy_delta", 1e-5),
        _is_not("privacy_unit", "node"),
    )
    for each in of_a_node:
        yield Conflict(
            (each, _missing("privacy_limit")),
            f"`{each.option}` needs a `privacy_limit`, such as 4",
        )


def _of_validation() -> Iterator[Conflict]:
    positive = Condition("validation", "above 0", lambda chosen: bool(chosen.validation))
    for method in ("paper", *BASELINES):
        yield Conflict(
            (positive, _is("method", method)),
            f"`method` {method} trains on all samples: `validation` must be 0",
        )
    yield Conflict(
        (positive, _PRIVATE),
        "`validation` does not work with `budget` privacy, which does not cover the losses "
        "of held-out samples: `validation` must be 0",
    )


def _of_personal_models() -> Iterator[Conflict]:
    personal = _on("personal")
    yield Conflict(
        (_BASELINE, personal),
        "`method` {method} has no `personal` models",
        "use `method` accelerated, frugal or paper",
    )
    yield Conflict(
        (_SECURE, personal),
        "`personal` does not work with `secure_aggregation`, in which nodes send only "
        "parts of sums",
        "omit one of them; nodes of an ordinary run can keep their figures",
    )


def _of_secure_aggregation() -> Iterator[Conflict]:
    yield Conflict(
        (_SECURE, _is("engine", "ray", "flower")),
        "`secure_aggregation` works only over gRPC (engine network), not with engine "
        "{engine}",
        "use fedbudget serve and join, or local",
    )
    yield Conflict(
        (_SECURE, _is("engine", "in-process"), _NOT_PRIVATE),
        "`secure_aggregation` works only over gRPC (engine network); engine in-process "
        "simulates its noise, and needs a `budget` of privacy",
        "use fedbudget serve and join, or local",
    )
    yield Conflict(
        (_SECURE, _is("engine", "in-process"), _is_not("participation", 1)),
        "`participation` must be 1 with `secure_aggregation` and engine in-process: a sum "
        "of too few nodes is not opened",
    )
    yield Conflict(
        (_given("secure_threshold"), _off("secure_aggregation")),
        "`secure_threshold` needs `secure_aggregation`",
    )
    yield Conflict(
        (_SECURE, _given("data")),
        "an aggregator that holds data (`data`) cannot use `secure_aggregation`",
        "start a separate node for its data",
    )
    yield Conflict(
        (_SECURE, _COMPRESSED),
        "`compress` {compress} does not work with `secure_aggregation`: masks use all bits",
    )
    yield Conflict(
        (_SECURE, _is("privacy_noise", "seeded"), _REMOTE),
        "`privacy_noise` seeded does not work with `secure_aggregation` and engine "
        "{engine}, in which nodes draw secret noise",
    )
    yield Conflict(
        (_SECURE, _is_not("workload", None, "equal")),
        "`workload` {workload} does not work with `secure_aggregation`: with different "
        "numbers of local updates, an aggregator could single out a report in a sum",
    )
    one_update = "`secure_aggregation` and `privacy_unit` sample make one update per round"
    yield Conflict(
        (_SECURE, _PER_SAMPLE, _is_not("tau", "adaptive", 1)),
        f"{one_update}: `tau` must be 1",
    )
    yield Conflict(
        (_SECURE, _PER_SAMPLE, _is_not("batch_size", None, "full")),
        f"{one_update}, with all samples of a node: `batch_size` must be full",
    )
    few = Condition(
        "nodes",
        f"below {FEWEST}",
        lambda chosen: chosen.nodes is not None and chosen.nodes < FEWEST,
    )
    yield Conflict(
        (_SECURE, few),
        f"`secure_aggregation` needs at least {FEWEST} nodes, not `nodes` {{nodes}}: a sum "
        "over fewer reveals too much about each",
    )
    yield Conflict(
        (_SECURE, _is_not("combine", None, "mean")),
        "`combine` {combine} needs the report of every node, which `secure_aggregation` "
        "hides: `combine` must be mean",
    )
    # With δ from parameters and drift correction, nodes report δ of the previous interval.
    adaptive = Condition("tau", "adaptive, or an automatic `step_size`", _estimates)
    paper = Condition(
        "method",
        "paper",
        lambda chosen: (
            chosen.method == "paper"
            and not (chosen.drift_correction and chosen.delta == "parameters")
        ),
    )
    without_correction = [
        each
        for each in _WITHOUT_DRIFT_CORRECTION
        if each.option not in ("method", "combine")
    ]
    for each in (*without_correction, paper, _is("delta", "gradient")):
        yield Conflict(
            (_SECURE, each, adaptive),
            f"with `{each.option}` {{{each.option}}}, the aggregator estimates δ from the "
            "report of every node, which `secure_aggregation` hides",
            "use `method` accelerated or frugal with drift correction, or a fixed `tau` "
            "and `step_size`",
        )


def _of_commands() -> Iterator[Conflict]:
    for option in ("ray_address", "actors"):
        yield Conflict(
            (_given(option), _is_not("engine", "ray")), f"`{option}` needs `engine` ray"
        )
    yield Conflict(
        (_given("resume"), _is("engine", "network")),
        "`resume` does not work with engine network: node processes cannot be resumed",
        "use fedbudget serve and fedbudget join",
    )
    for option in ("out", "task", "config"):
        yield Conflict(
            (_given("resume"), _given(option)),
            "`resume` uses the folder and the settings of the run",
            f"omit `{option}`",
        )
    yield Conflict(
        (_given("task"), _given("config")),
        "give `task` or `config`, not both",
        "fedbudget tasks NAME prints a task as a file",
    )
    for option in ("case", "cases"):
        yield Conflict(
            (_given(option), _given("partition")),
            f"give `{option}` or `partition`, not both",
        )
    of_rivals = (_given("partition"), _given("jobs"), _given("out"), _on("quick"))
    for each in of_rivals:
        yield Conflict((each, _off("rivals")), f"`{each.option}` goes with `rivals`")
    wrong_number = Condition(
        "pace",
        "with another number of values",
        lambda chosen: (
            chosen.pace is not None and len(chosen.pace) != (chosen.nodes or DEFAULT_NODES)
        ),
    )
    any_number = Condition("nodes", "any number", lambda chosen: True)
    yield Conflict(
        (wrong_number, any_number),
        "`pace` needs one value for each of the `nodes`",
    )
    yield Conflict(
        (_given("energy_meter"), _missing("data")),
        "`energy_meter` needs data on this machine",
        "set it at fedbudget join, or add `data`",
    )
    shard = Condition(
        "shard",
        "given, or `dataset` given",
        lambda chosen: chosen.shard is not None or chosen.dataset is not None,
    )
    yield Conflict(
        (_given("data"), shard), "give `data`, or `dataset` with `shard`, not both"
    )
    yield Conflict((_given("test"), _missing("data")), "`test` needs `data`")


CONFLICTS = (
    *_baselines(),
    *_of_methods(),
    *_of_local_steps(),
    *_of_newton(),
    *_of_data(),
    *_of_privacy(),
    *_of_validation(),
    *_of_personal_models(),
    *_of_secure_aggregation(),
    *_of_commands(),
)
"""All conflicts between options."""
