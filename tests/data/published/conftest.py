"""A small dataset among the published ones, and servers on this machine that have it."""

from collections.abc import Iterator

import pytest

from fedbudget.data.published import PUBLISHED
from support.fetching import CONTENTS, ZIPPED
from support.web import Web, dataset_of, serving


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "small", dataset_of(CONTENTS))
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(ZIPPED) as web:
        yield web


@pytest.fixture
def other() -> Iterator[Web]:
    with serving(ZIPPED) as web:
        yield web
