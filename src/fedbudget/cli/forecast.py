"""`fedbudget forecast`, and the text of a forecast for other commands."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.cli.console import console, plain_table
from fedbudget.cli.options import RUN, OutputOptions, command
from fedbudget.settings.option import option

if TYPE_CHECKING:
    from fedbudget.forecasts.forecast import ForecastReport, Interval, TargetCost


@command
def forecast(
    *,
    run: Path = RUN,
    budget: tuple[str, ...] = option(
        (), "time=+10min for 10 min more, time=20min for 20 min in total; repeatable."
    ),
    until: tuple[str, ...] = option(
        (), "A target whose cost to forecast, loss=0.25 or accuracy=0.9; repeatable."
    ),
    output: OutputOptions,
) -> None:
    """Forecast the loss with more budget, and the cost of a target.

    The forecasts extrapolate the run's own curve and come with 80 % intervals. An
    unfinished run is forecast to the end of its budget, a finished run with 10 %, 50 % and
    100 % more budget.

    Examples:

      fedbudget forecast runs/NAME

      fedbudget forecast runs/NAME --budget time=+10min

      fedbudget forecast runs/NAME --until loss=0.25 --until accuracy=0.9
    """
    from fedbudget.forecasts.forecast import forecast as make_forecast

    report = make_forecast(run, budget=budget, until=until)
    if output.json:
        print(json.dumps(report.to_json()))
    else:
        _print(report)


def interval_text(interval: "Interval | None") -> str:
    """Return the median and the interval, such as 0.2434 (0.2427 to 0.2437)."""
    if interval is None:
        return "unknown"
    return f"{interval.median:.4f} ({interval.low:.4f} to {interval.high:.4f})"


def loss_name(*, validated: bool) -> str:
    """Return the name of the loss that is forecast."""
    return "validation loss" if validated else "loss"


def extension_text(interval: "Interval", now: float) -> str:
    """Return the forecast loss with more budget, or that no improvement is expected.

    Args:
      interval: the forecast.
      now: loss of the result.
    """
    text = interval_text(interval)
    if f"{interval.median:.4f}" != f"{now:.4f}":
        return text
    return f"no improvement expected, {text}"


def _print(report: "ForecastReport") -> None:
    from fedbudget.resources import RESOURCES

    out = console()
    amounts = [
        f"{name} {RESOURCES[name].format(amount)}" for name, amount in report.spent.items()
    ]
    name = loss_name(validated=report.validated)
    loss = "" if report.loss is None else f"; {name} {report.loss:.4f}"
    accuracy = "" if report.accuracy is None else f", accuracy {report.accuracy:.4f}"
    out.print(f"spent {', '.join(amounts)}{loss}{accuracy}")
    if report.budgets:
        resources = list(report.limits)
        rows = []
        for each in report.budgets:
            row = [RESOURCES[kind].format(each.spent[kind]) for kind in resources]
            rows.append([*row, interval_text(each.loss), interval_text(each.accuracy)])
        out.print(plain_table((*resources, name, "accuracy"), rows, no_wrap=True))
        for reason in dict.fromkeys(each.reason for each in report.budgets if each.reason):
            out.print(f"{name} unknown: {reason}")
    for target in report.targets:
        figure = name if target.figure == "loss" else target.figure
        out.print(f"{figure} {target.value:g}: {_cost_text(target)}")
    out.print(f"{100 * report.chance:.0f} % interval in brackets", style="dim")


def _cost_text(target: "TargetCost") -> str:
    from fedbudget.resources import RESOURCES

    if target.budget is None:
        reached = "already" in target.reason
        return target.reason if reached else f"cost unknown: {target.reason}"
    texts = []
    for name, cost in target.budget.items():
        show = RESOURCES[name].format
        interval = f"{show(cost.low)} to {show(cost.high)}"
        if math.isinf(cost.high):
            interval = f"{show(cost.low)} or more"
        texts.append(f"{name} {show(cost.median)} ({interval})")
    return ", ".join(texts)
