"""`fedbudget tokens`: who may take part, by a token for each node."""

from pathlib import Path

import typer

from fedbudget.cli.command import command
from fedbudget.option import REQUIRED, option

NAME: str = option(REQUIRED, "The node's name, as of join --name.", argument=True)
FILE: Path = option(Path("tokens"), "The file of tokens, as of serve --token-file.")

app = typer.Typer(
    help="Give nodes tokens of their own, and take them back.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.command()
@command
def add(*, name: str = NAME, file: Path = FILE) -> None:
    """Give a node a token; it is printed once, for the node's own file.

    Examples:

      fedbudget tokens add edge-1 > edge-1.token

      fedbudget tokens add edge-2 --file /etc/fedbudget/tokens
    """
    from fedbudget.engines.grpc.tokens import add_token

    print(add_token(file, name))


@app.command()
@command
def revoke(*, name: str = NAME, file: Path = FILE) -> None:
    """Take a node's token back; an aggregator that runs drops the node within seconds.

    Examples:

      fedbudget tokens revoke edge-1
    """
    from fedbudget.engines.grpc.tokens import revoke_token

    revoke_token(file, name)


@app.command("list")
@command
def list_names(*, file: Path = FILE) -> None:
    """Print the names of nodes that have a token; tokens are not shown.

    Examples:

      fedbudget tokens list
    """
    from fedbudget.engines.grpc.tokens import names_with_tokens

    for name in names_with_tokens(file):
        print(name)
