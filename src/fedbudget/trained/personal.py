"""Personal models for people: the files of a node, and the site report as text.

A node writes its own model as `model.safetensors` and the global one as
`global.safetensors`. A gateway of several nodes writes `model-1.safetensors` and so on for
the others.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedbudget import durable_files
from fedbudget.engines.remote.worker import NodeResult
from fedbudget.protocol.site_figures import SiteFigure, SiteFigures
from fedbudget.runs.folder import MODEL
from fedbudget.runs.text import NAMES, format_metric
from fedbudget.trained.model import TrainedModel

_CERTAIN = 2.0
"""Standard errors of a clear difference."""

_MOST_LINES = 12
_LONGEST_NAME = 16
_KEPT = {"few rows": "few rows", "one class": "one class"}


def save_result(result: NodeResult, folder: Path | None, model: str | None) -> str:
    """Write the models of a node; return a line about them.

    Args:
      result: the result of the run at this node.
      folder: for the files; None to write nothing.
      model: name of a custom model, such as net.py:Net.
    """
    text = "; ".join(_summary(each.figures) for each in result.personal)
    if folder is None:
        return f"{text}; not saved, because `save_model` is not set"
    name = result.name or model or result.model.name
    shared = TrainedModel(name, result.model, result.w, result.samples)
    models = {"global.safetensors": shared}
    for index, each in enumerate(result.personal):
        file = f"model-{index}.safetensors" if index else MODEL
        models[file] = shared.corrected(each.w, each.shift)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file, trained in models.items():
            durable_files.replace(folder / file, trained.saved().to_bytes())
    except OSError as error:
        return f"{text}; {folder} cannot be written to: {error.strerror}"
    return f"{text}; saved in {folder}"


def _summary(figures: SiteFigures) -> str:
    """Describe the personal model of one node in a line."""
    if figures.kept == "few rows":
        return f"keeps the global model: {figures.rows} rows are too few to correct it"
    if figures.kept == "one class":
        return "keeps the global model: all rows of this node are of one class"
    share = 1 - figures.weights[0]
    text = f"personal model: {share:.0%} from this node's rows"
    if figures.personal is None or figures.shared is None:
        return text
    own = format_metric(figures.metric, figures.personal.value)
    shared = format_metric(figures.metric, figures.shared.value)
    return f"{text}, {figures.metric} {own}, global model {shared}"


def site_table(report: Mapping[str, SiteFigures]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the site report.

    Of many sites, those that gain least and most are listed.

    Args:
      report: figures by name of the site.
    """
    names = sorted(report, key=lambda name: _gain(report[name]))
    half = _MOST_LINES // 2
    if len(names) > _MOST_LINES:
        names = [*names[:half], *names[-half:]]
    headings = ["site", "rows", "trivial", "alone", "global", "personal", "gain"]
    rows = []
    for name in names:
        site = report[name]
        gain = _KEPT.get(site.kept) or _value(site, site.gain, signed=True)
        short = name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
        figures = [site.trivial, site.alone, site.shared]
        values = [_value(site, each, error=False) for each in figures]
        rows.append([short, str(site.rows), *values, _value(site, site.personal), gain])
    return headings, rows


def site_summary(report: Mapping[str, SiteFigures]) -> list[str]:
    """Return sentences about all sites."""
    gains = [site.gain for site in report.values() if site.gain is not None]
    lines = []
    if gains:
        better, clearly = _counts(gains)
        lines.append(
            f"personal beats alone at {better} of {len(gains)} sites "
            f"({clearly} by more than two errors)"
        )
    corrections = [each.correction for each in report.values() if each.correction]
    if corrections:
        better, clearly = _counts(corrections)
        lines.append(
            f"personal beats global at {better} of {len(corrections)} sites "
            f"({clearly} by more than two errors)"
        )
    unserved = [name for name, site in report.items() if not site.served]
    if unserved:
        shown = ", ".join(unserved[:_MOST_LINES])
        more = f" and {len(unserved) - _MOST_LINES} more"
        lines.append(
            "the global model is no better than a constant prediction at: "
            f"{shown}{more if len(unserved) > _MOST_LINES else ''}"
        )
    return lines


def site_title(report: Mapping[str, SiteFigures]) -> str:
    """Return the title of the site report."""
    sites = list(report.values())
    metric = sites[0].metric
    held_out = sum(site.held_out for site in sites)
    where = "held-out rows"
    if held_out < len(sites):
        where += f" of {held_out}, all rows of others"
    name = NAMES.get(metric, metric)
    return f"{name} at {len(sites)} sites, {where}; gain: personal over alone"


def _counts(differences: Sequence[SiteFigure]) -> tuple[int, int]:
    """Return how many differences are positive, and how many clearly."""
    better = [each for each in differences if each.value > 0]
    return len(better), sum(each.value > _CERTAIN * each.error for each in better)


def _gain(site: SiteFigures) -> float:
    return 0.0 if site.gain is None else site.gain.value


def _value(
    site: SiteFigures,
    figure: SiteFigure | None,
    *,
    error: bool = True,
    signed: bool = False,
) -> str:
    if figure is None:
        return "-"
    digits = ".3f" if site.metric == "accuracy" else ".3g"
    text = f"{figure.value:{'+' if signed else ''}{digits}}"
    return f"{text} ± {figure.error:{digits}}" if error else text
