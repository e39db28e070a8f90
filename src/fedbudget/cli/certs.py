"""`fedbudget certs`."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedbudget.errors import UserError


def certs(
    folder: Annotated[
        Path,
        typer.Argument(help="Where they go. A CA that is there already is used.  [default: certs]", show_default=False),
    ] = Path("certs"),
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or IP address by which nodes reach the aggregator; may be repeated.  "
            "[default: localhost, 127.0.0.1, ::1, unless the aggregator has a certificate]"
        ),
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="A node that gets a certificate of its own; may be repeated.")
    ] = None,
    days: Annotated[
        int, typer.Option(help="How long certificates are valid.  [default: 365]", show_default=False)
    ] = 365,
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
        raise UserError(f"certs needs {error.name}; install it with: pip install 'fedbudget[network]'") from None

    hosts, nodes = host or certificates.default_hosts(folder), node or []
    for file in certificates.make(folder, hosts=hosts, nodes=nodes, days=days):
        print(file)

    ca, cert, key = (shlex.quote(str(folder / name)) for name in ("ca.pem", "aggregator.pem", "aggregator.key"))
    serve = f"fedbudget serve --cert {cert} --key {key}"
    join = f"fedbudget join {join_address(hosts[0].strip('[]'), DEFAULT_PORT) if hosts else 'HOST:PORT'} --ca {ca}"
    if nodes:
        own = [shlex.quote(str(folder / f"{nodes[0]}.{suffix}")) for suffix in ("pem", "key")]
        serve, join = f"{serve} --client-ca {ca}", f"{join} --cert {own[0]} --key {own[1]}"
    print(f"\nat the aggregator:\n  {serve} ...")
    print(f"at {'each node, with its own certificate' if nodes else 'each node'}:\n  {join} ...")
    print(f"{shlex.quote(str(folder / 'ca.key'))} makes further certificates; keep it where neither of them runs")
