"""`fedbudget certs`."""

import shlex
from pathlib import Path

from fedbudget.cli.command import command
from fedbudget.errors import UserError
from fedbudget.option import option


@command
def certs(
    *,
    folder: Path = option(Path("certs"), "Where they go. A CA that is there already is used.", argument=True),
    host: tuple[str, ...] = option(
        (),
        "A name or IP address by which nodes reach the aggregator; may be repeated.",
        shown="localhost, 127.0.0.1, ::1, unless the aggregator has a certificate",
    ),
    node: tuple[str, ...] = option((), "A node that gets a certificate of its own; may be repeated."),
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
        raise UserError(f"certs needs {error.name}; install it with: pip install 'fedbudget[network]'") from None

    hosts = host or certificates.default_hosts(folder)
    for file in certificates.make(folder, hosts=hosts, nodes=node, days=days):
        print(file)

    ca, cert, key = (shlex.quote(str(folder / name)) for name in ("ca.pem", "aggregator.pem", "aggregator.key"))
    serve = f"fedbudget serve --cert {cert} --key {key}"
    join = f"fedbudget join {join_address(hosts[0].strip('[]'), DEFAULT_PORT) if hosts else 'HOST:PORT'} --ca {ca}"
    if node:
        own = [shlex.quote(str(folder / f"{node[0]}.{suffix}")) for suffix in ("pem", "key")]
        serve, join = f"{serve} --client-ca {ca}", f"{join} --cert {own[0]} --key {own[1]}"
    print(f"\nat the aggregator:\n  {serve} ...")
    print(f"at {'each node, with its own certificate' if node else 'each node'}:\n  {join} ...")
    print(f"{shlex.quote(str(folder / 'ca.key'))} makes further certificates; keep it where neither of them runs")
