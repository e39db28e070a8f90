"""Echo of a round's messages over gRPC.

It measures the time of the same bytes without any computation.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.rounds import Case

_ECHO = "/echo.Echo/Converse"


def aggregate(
    case: "Case", certificates: Path | None, opened: Callable[[int], None]
) -> dict[str, list[float]]:
    return {"bare": asyncio.run(_echo_rounds(case, certificates, opened))}


async def _echo_rounds(
    case: "Case", certificates: Path | None, opened: Callable[[int], None]
) -> list[float]:
    import grpc

    from fedbudget.engines.grpc.credentials import aggregator_credentials
    from fedbudget.engines.remote.wire import LONGEST

    broadcast, report = _messages(case)
    everyone, over = asyncio.Event(), asyncio.Event()
    contexts: list[Any] = []

    async def converse(_: Any, context: Any) -> None:
        contexts.append(context)
        if len(contexts) == case.nodes:
            everyone.set()
        await over.wait()

    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", LONGEST), ("grpc.so_reuseport", 0)]
    )
    handler = grpc.stream_stream_rpc_method_handler(converse)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("echo.Echo", {"Converse": handler}),)
    )
    if certificates is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        credentials = aggregator_credentials(
            certificates / "aggregator.pem", certificates / "aggregator.key", None
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    opened(port)
    await everyone.wait()

    async def trip(context: Any) -> None:
        for message in broadcast:
            await context.write(message)
        for _ in report:
            await context.read()

    ended = [time.perf_counter()]
    for _ in range(case.rounds):
        await asyncio.gather(*(trip(context) for context in contexts))
        ended.append(time.perf_counter())
    over.set()
    await server.stop(0.2)
    return [after - before for before, after in pairwise(ended)]


async def answer(
    case: "Case", certificates: Path | None, address: str, numbers: Sequence[int]
) -> None:
    import grpc

    from fedbudget.engines.grpc.credentials import node_credentials
    from fedbudget.engines.remote.wire import LONGEST

    broadcast, report = _messages(case)
    options = [
        ("grpc.max_receive_message_length", LONGEST),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    credentials = node_credentials(
        None if certificates is None else certificates / "ca.pem", None, None
    )

    async def echo() -> None:
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            channel = grpc.aio.secure_channel(address, credentials, options=options)
        async with channel:
            call = channel.stream_stream(_ECHO)()
            while True:
                for _ in broadcast:
                    if await call.read() is grpc.aio.EOF:
                        return
                for message in report:
                    await call.write(message)

    await asyncio.gather(*(echo() for _ in numbers))


def _messages(case: "Case") -> tuple[list[bytes], list[bytes]]:
    """Return the packed broadcast and report of such a run."""
    import numpy as np

    from fedbudget.engines.grpc.stream import frames
    from fedbudget.engines.remote.wire import pack_broadcast, pack_report
    from fedbudget.protocol.features.drift import DriftCorrection, DriftPart
    from fedbudget.protocol.features.estimates import EstimateSlopes
    from fedbudget.protocol.features.feature import Feature, report_layout
    from fedbudget.protocol.messages import RoundPart, TrainReport, TrainRound
    from fedbudget.resources.resource import Reading, Usage

    w = np.random.default_rng(0).normal(size=case.parameters).astype(np.float32)
    features: tuple[Feature, ...] = ()
    parts: tuple[RoundPart, ...] = ()
    if case.method == "frugal":
        features = (DriftCorrection(), EstimateSlopes())
        parts = (DriftPart(correct=True, share=1.0),)
    layout = report_layout(features, first=False)
    broadcast = TrainRound(
        round=9, w=w, report=layout, tau=1, eta=0.01, effective=1, best=True, parts=parts
    )
    report = TrainReport(
        round=9,
        nodes=np.arange(1),
        sizes=np.full(1, 4),
        numbers={name: np.full(1, 0.5) for name in layout.numbers},
        vectors=dict.fromkeys(layout.vectors, w[None]),
    )
    costs = Usage({"time": Reading(1e-4, 1e-3)})
    packed = pack_broadcast(broadcast, base_round=8, catch_up=False)
    return frames(packed), frames(pack_report(report, costs, w.tobytes()))
