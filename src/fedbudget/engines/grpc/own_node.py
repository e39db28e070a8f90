"""The node that the aggregator is itself, where it holds data: the same work as any other's, in a thread of its own."""

import asyncio
import concurrent.futures
from collections.abc import Callable
from dataclasses import replace

from fedbudget.engines.remote.messages import Answer, RoundRequest, Welcome
from fedbudget.engines.remote.worker import Worker
from fedbudget.resources.usage import NodeCosts


class OwnNode:
    """A worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.trial: NodeCosts | None = None
        self.busy = False
        self._executor = concurrent.futures.ThreadPoolExecutor(1, "fedbudget-own-node")

    @property
    def nodes(self) -> int:
        return len(self.worker.node_data.rows)

    async def start(self, welcome: Welcome) -> None:
        """Takes the task, and makes a trial round."""
        loop = asyncio.get_running_loop()
        self.trial = await loop.run_in_executor(self._executor, self.worker.start, welcome)

    def ask(self, request: RoundRequest, done: "Callable[[asyncio.Future[Answer]], None]") -> None:
        """Makes a round; in the event loop's thread.

        Args:
          done: called there with the answer, or with what went wrong.
        """

        def finish(future: "asyncio.Future[Answer]") -> None:
            self.busy = False
            if not future.cancelled():
                done(future)

        self.busy = True
        asyncio.get_running_loop().run_in_executor(self._executor, self._answer, request).add_done_callback(finish)

    def _answer(self, request: RoundRequest) -> Answer:
        answer = self.worker.answer(request)
        return replace(answer, costs=replace(answer.costs, here=True))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
