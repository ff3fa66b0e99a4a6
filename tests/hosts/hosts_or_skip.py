"""Hosts for a test, which is skipped where this machine can't play them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from namespaces import Hosts, HostsUnavailableError


@contextlib.contextmanager
def hosts_or_skip(count: int, **options: Any) -> Iterator[Hosts]:
    """`Hosts(count, **options)`; the reason of a skip says what they need."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(count, **options))
        except HostsUnavailableError as error:
            pytest.skip(str(error))
        yield hosts
