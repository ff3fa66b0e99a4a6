"""What pytest finds for all tests: time limits, SIGINT, what processes that they start run first
(started_processes/sitecustomize.py), a cache of their own, ranks that start quickly, and that no
file leaves a job behind.

A shell without job control starts `make test &` with SIGINT ignored, and so is it then in every
process that comes of it. The tests send SIGINT to some of these, so it gets Python's own handler
here, and with it wherever a process starts from here.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from time_limit import pytest_configure, pytest_timeout_cancel_timer, pytest_timeout_set_timer

__all__ = [
    "leaves_no_job",
    "pytest_collection_finish",
    "pytest_configure",
    "pytest_timeout_cancel_timer",
    "pytest_timeout_set_timer",
]

signal.signal(signal.SIGINT, signal.default_int_handler)

# Jobs of tests neither begin with what those of this user have found to be fastest, nor tell them.
_CACHE = tempfile.mkdtemp(prefix="pydist-tests-cache-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHE

_FIRST = str(Path(__file__).with_name("started_processes"))
_PATH = os.environ.get("PYTHONPATH", "")
if _FIRST not in _PATH.split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join([_FIRST, *([_PATH] if _PATH else [])])


# Folders in which nearly every test starts ranks; in `python` many start none.
_OF_RANKS = {
    Path(__file__).with_name(name)
    for name in ("drop_in", "faults", "frameworks", "hosts", "programs")
}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Loads torch for all ranks before the first test's limit counts: a slow disk takes long."""
    if not session.config.option.collectonly and any(map(_uses_ranks, session.items)):
        from launch import warm_up

        warm_up()


def _uses_ranks(item: pytest.Item) -> bool:
    if not _OF_RANKS.isdisjoint(item.path.parents):
        return True
    module = getattr(item, "module", None)
    names = {"Ranks", "Runner", "rank_outcomes", "run_ranks"}
    return not names.isdisjoint(vars(module) if module else ())


@pytest.fixture(scope="module", autouse=True)
def leaves_no_job() -> Iterator[None]:
    """Whatever else this process tests next begins outside of a job, in any order of files."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        if "pydist" in sys.modules:
            sys.modules["pydist"].shutdown()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        pytest.fail("the tests of this file have left this process in a job")
