"""`fedbudget certs`.

`fedbudget tokens`: who may take part, by a token for each node.
"""

import shlex
from pathlib import Path

import typer

from fedbudget.cli.options import command
from fedbudget.errors import UserError
from fedbudget.settings.option import REQUIRED, option


@command
def certs(
    *,
    folder: Path = option(
        Path("certs"), "Where they go. A CA that is there already is used.", argument=True
    ),
    host: tuple[str, ...] = option(
        (),
        "A name or IP address by which nodes reach the aggregator; may be repeated.",
        shown="localhost, 127.0.0.1, ::1, unless the aggregator has a certificate",
    ),
    node: tuple[str, ...] = option(
        (), "A node that gets a certificate of its own; may be repeated."
    ),
    days: int = option(365, "How long certificates are valid."),
) -> None:
    """Make a small CA and certificates, for encryption in a trial.

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

    ca, cert, key = (
        shlex.quote(str(folder / name))
        for name in ("ca.pem", "aggregator.pem", "aggregator.key")
    )
    serve = f"fedbudget serve --cert {cert} --key {key}"
    join = f"fedbudget join {join_address(hosts[0].strip('[]'), DEFAULT_PORT) if hosts else 'HOST:PORT'} --ca {ca}"
    if node:
        own = [
            shlex.quote(str(folder / f"{node[0]}.{suffix}")) for suffix in ("pem", "key")
        ]
        serve, join = f"{serve} --client-ca {ca}", f"{join} --cert {own[0]} --key {own[1]}"
    print(f"\nat the aggregator:\n  {serve} ...")
    print(
        f"at {'each node, with its own certificate' if node else 'each node'}:\n  {join} ..."
    )
    print(
        f"{shlex.quote(str(folder / 'ca.key'))} makes further certificates; keep it where neither of them runs"
    )


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
