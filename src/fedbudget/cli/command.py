"""Commands from declarations: a function that takes dataclasses of options becomes a command that has these options.

    @command
    def run(settings: Settings, engine: EngineOptions, output: OutputOptions) -> None: ...

A command has those fields of a dataclass that say so, and what is not given is left to the dataclass. `Settings` come
with what they can be taken from, `--config`, `--task` and `--case`; a function that has to know what was given and what
was not takes `Given` in their place.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from fedbudget.cli.options import Given, SourceOptions, settings_from, was_given
from fedbudget.cli.parameters import parameter
from fedbudget.option import Declaration, declarations
from fedbudget.settings import Settings


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as Typer wants it, with an argument for each option."""
    name, parts = function.__name__, get_type_hints(function)
    del parts["return"]

    def called(**given: Any) -> None:
        function(**{part: _made(cls, name, given) for part, cls in parts.items()})

    parameters = [parameter(each, name) for cls in parts.values() for each in _declared(cls) if each.within(name)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__name__, called.__doc__ = name, function.__doc__
    return called


def _declared(cls: type[Any]) -> Iterator[Declaration]:
    if cls in (Settings, Given):
        yield from declarations(Settings).values()
        cls = SourceOptions
    yield from declarations(cls).values()


def _made(cls: type[Any], command: str, given: Mapping[str, Any]) -> Any:
    if cls is Given:
        return Given(given)
    if cls is Settings:
        return settings_from(given, command)
    known = declarations(cls)
    return cls(**{name: known[name].converted(value, text=True) for name, value in was_given(given, known)})
