"""`fedbudget forecast`, and forecasts in a sentence for whoever shows a run."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedbudget.cli.options import RUN, OutputOptions, command
from fedbudget.settings.option import option

if TYPE_CHECKING:
    from fedbudget.forecasts.forecast import ForecastReport, Interval, TargetCost


@command
def forecast(
    *,
    run: Path = RUN,
    budget: tuple[str, ...] = option(
        (), "time=+10min for so much more, time=20min for so much in all; repeatable."
    ),
    until: tuple[str, ...] = option(
        (), "What a target costs, loss=0.25 or accuracy=0.9; repeatable."
    ),
    output: OutputOptions,
) -> None:
    """Tell what more budget would buy, and what a target would cost.

    Both are judged by the run's own curve, and hold with a chance of 80 %. A run that is not over is forecast to the
    end of its budget; one that is over, with a tenth, half and as much again.

    Examples:

      fedbudget forecast runs/NAME

      fedbudget forecast runs/NAME --budget time=+10min

      fedbudget forecast runs/NAME --until loss=0.25 --until accuracy=0.9
    """
    from fedbudget.forecasts.forecast import forecast as made

    report = made(run, budget=budget, until=until)
    if output.json:
        print(json.dumps(report.to_json()))
        return
    _print(report)


def interval_text(interval: "Interval | None") -> str:
    """A figure with its interval."""
    return (
        "not known"
        if interval is None
        else f"{interval.median:.4f} ({interval.low:.4f} to {interval.high:.4f})"
    )


def _print(report: "ForecastReport") -> None:
    from fedbudget.cli.console import console, plain_table
    from fedbudget.resources import RESOURCES

    out = console()
    names = list(report.limits)
    now = "" if report.loss is None else f"; loss {report.loss:.4f}"
    now += "" if report.accuracy is None else f", accuracy {report.accuracy:.4f}"
    out.print(f"spent {_amounts(report.spent)}{now}", highlight=False)
    if report.budgets:
        table = plain_table((*names, "loss", "accuracy"), no_wrap=True)
        for each in report.budgets:
            amounts = [RESOURCES[name].format(each.spent[name]) for name in names]
            table.add_row(*amounts, interval_text(each.loss), interval_text(each.accuracy))
        out.print(table)
        for reason in dict.fromkeys(each.reason for each in report.budgets if each.reason):
            out.print(f"loss is not known: {reason}", highlight=False)
    for target in report.targets:
        out.print(
            f"{target.figure} {target.value:g}: {_cost_text(target)}", highlight=False
        )
    out.print(
        f"in brackets: from where to where with a chance of {report.chance:.0%}",
        style="dim",
        highlight=False,
    )


def _cost_text(target: "TargetCost") -> str:
    from fedbudget.resources import RESOURCES

    if target.budget is None:
        return (
            f"cost not known: {target.reason}"
            if "already" not in target.reason
            else target.reason
        )
    texts = []
    for name, cost in target.budget.items():
        show = RESOURCES[name].format
        to = "no end known" if math.isinf(cost.high) else f"to {show(cost.high)}"
        texts.append(
            f"{name} {show(cost.median)} ({show(cost.low)} {'and' if math.isinf(cost.high) else ''} {to})"
        )
    return ", ".join(" ".join(text.split()) for text in texts)


def _amounts(amounts: Mapping[str, float]) -> str:
    from fedbudget.resources import RESOURCES

    return ", ".join(
        f"{name} {RESOURCES[name].format(amount)}" for name, amount in amounts.items()
    )
