"""Commands from declarations: a function becomes a command that has the options which its arguments declare.

    @command
    def sweep(*, settings: Settings, jobs: int | None = option(None, ...), output: OutputOptions) -> None: ...

An argument is an option itself, or a dataclass of options, of which a command has those fields that say so; what is not
given is left to the default. `Settings` come with what they can be taken from, `--config`, `--task` and `--case`; a
function that has to know what was given and what was not takes `Given` in their place.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any, get_type_hints

from fedbudget.cli.options import Given, SourceOptions, settings_from, was_given
from fedbudget.cli.parameters import parameter
from fedbudget.option import Declaration, declarations, declared
from fedbudget.settings import Settings


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as Typer wants it, with an argument for each option."""
    name, hints = function.__name__, get_type_hints(function, include_extras=True)
    own: dict[str, Declaration] = {}  # options that are arguments of the function
    parts: dict[str, Any] = {}
    options: list[Declaration] = []
    for each in inspect.signature(function).parameters.values():
        if isinstance(each.default, Field):
            own[each.name] = declared(each.name, hints[each.name], each.default)
            options.append(own[each.name])
        else:
            parts[each.name] = hints[each.name]
            options += _options(hints[each.name])

    def called(**given: Any) -> None:
        made = {part: _made(cls, name, given) for part, cls in parts.items()}
        function(**made, **{option: each.default for option, each in own.items()} | _converted(own, given))

    parameters = [parameter(each, name) for each in options if each.within(name)]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__name__, called.__doc__ = name, function.__doc__
    return called


def _options(cls: Any) -> list[Declaration]:
    classes: tuple[Any, ...] = (Settings, SourceOptions) if cls in (Settings, Given) else (cls,)
    return [option for each in classes for option in declarations(each).values()]


def _made(cls: Any, command: str, given: Mapping[str, Any]) -> Any:
    if cls is Given:
        return Given(given)
    return settings_from(given, command) if cls is Settings else cls(**_converted(declarations(cls), given))


def _converted(options: Mapping[str, Declaration], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name].converted(value, text=True) for name, value in was_given(given, options)}
