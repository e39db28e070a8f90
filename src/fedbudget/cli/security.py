"""`fedbudget certs` and `fedbudget tokens`: certificates, and tokens of nodes."""

import shlex
from pathlib import Path

import typer

from fedbudget.cli.options import command
from fedbudget.errors import UserError
from fedbudget.settings.option import REQUIRED, option

NAME: str = option(REQUIRED, "The node's name, as in join --name.", argument=True)
FILE: Path = option(Path("tokens"), "The file of tokens, as in serve --token-file.")

app = typer.Typer(help="Create and revoke tokens of nodes.", no_args_is_help=True)


@command
def certs(
    *,
    folder: Path = option(
        Path("certs"), "The folder to write; a CA in it is reused.", argument=True
    ),
    host: tuple[str, ...] = option(
        (),
        "A name or IP address by which nodes reach the aggregator; repeatable.",
        shown="localhost, 127.0.0.1, ::1, unless the aggregator has a certificate",
    ),
    node: tuple[str, ...] = option((), "A node that needs a certificate; repeatable."),
    days: int = option(365, "Validity of the certificates in days."),
) -> None:
    """Create a small CA and certificates, for encryption in a trial.

    Examples:

      fedbudget certs

      fedbudget certs --host aggregator.example --node edge-1 --node edge-2

      fedbudget certs --node edge-3
    """
    try:
        from fedbudget.engines.grpc import certificates
        from fedbudget.engines.grpc.credentials import DEFAULT_PORT, join_address
    except ModuleNotFoundError as error:
        raise UserError(
            f"certs needs {error.name}; install it with: pip install 'fedbudget[network]'"
        ) from None

    hosts = host or certificates.default_hosts(folder)
    for file in certificates.make(folder, hosts=hosts, nodes=node, days=days):
        print(file)

    def path(name: str) -> str:
        return shlex.quote(str(folder / name))

    address = "HOST:PORT"
    if hosts:
        address = join_address(hosts[0].strip("[]"), DEFAULT_PORT)
    serve = (
        f"fedbudget serve --cert {path('aggregator.pem')} --key {path('aggregator.key')}"
    )
    join = f"fedbudget join {address} --ca {path('ca.pem')}"
    each = "each node"
    if node:
        serve += f" --client-ca {path('ca.pem')}"
        join += f" --cert {path(f'{node[0]}.pem')} --key {path(f'{node[0]}.key')}"
        each = "each node, with its own certificate"
    print(f"\nat the aggregator:\n  {serve} ...")
    print(f"at {each}:\n  {join} ...")
    print(f"{path('ca.key')} signs further certificates; keep it on another machine")


@app.command()
@command
def add(*, name: str = NAME, file: Path = FILE) -> None:
    """Create a token for a node, and print it once.

    Keep it in a file at the node.

    Examples:

      fedbudget tokens add edge-1 > edge-1.token

      fedbudget tokens add edge-2 --file /etc/fedbudget/tokens
    """
    from fedbudget.engines.grpc.tokens import add_token

    print(add_token(file, name))


@app.command()
@command
def revoke(*, name: str = NAME, file: Path = FILE) -> None:
    """Revoke a node's token.

    A running aggregator drops the node within seconds.

    Examples:

      fedbudget tokens revoke edge-1
    """
    from fedbudget.engines.grpc.tokens import revoke_token

    revoke_token(file, name)


@app.command("list")
@command
def list_names(*, file: Path = FILE) -> None:
    """Print the names of nodes with a token, without the tokens.

    Examples:

      fedbudget tokens list
    """
    from fedbudget.engines.grpc.tokens import names_with_tokens

    for name in names_with_tokens(file):
        print(name)
