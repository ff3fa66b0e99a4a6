"""Each drill once; `make drills` repeats them and writes the table of docs/failure.md."""

from typing import Any

import pytest
from drills import DRILLS
from launchers import LAUNCHER_DRILLS
from rehearsal import rehearse, rehearse_launcher
from scene import Drill, LauncherDrill

pytestmark = pytest.mark.timeout(120)

# Those of the everyday tests: one of a kind.
EVERYDAY = {
    ("SIGKILL in a collective of 4 MiB", "native", 4),
    ("SIGKILL with live workers of a data loader", "native", 2),
    ("SIGSTOP, and SIGCONT after 0.5 s", "native", 2),
    ("another order", "native", 2),
    ("raising in backward", "native", 2),
    ("a hostile process at every socket", "native", 2),
    ("SIGKILL of pydist run", "any", 2),
}


def performances() -> list[Any]:
    found = []
    for drill in DRILLS:
        for backend in drill.backends:
            for size in drill.sizes:
                everyday = (drill.name, backend, size) in EVERYDAY
                marks = [] if everyday else [pytest.mark.thorough]
                name = f"{drill.name}-{backend}-{size}"
                found.append(pytest.param(drill, backend, size, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("drill", "backend", "size"), performances())
def test_drill(drill: Drill, backend: str, size: int) -> None:
    if obstacle := drill.obstacle():
        pytest.skip(obstacle)
    # `make drills` looks at the times, on a machine that does nothing else.
    result = rehearse(drill, backend, size, slack=5.0)
    assert set(result.left) <= set(drill.left_by_torch)


@pytest.mark.parametrize(
    "drill",
    [
        pytest.param(
            drill,
            marks=[] if (drill.name, "any", 2) in EVERYDAY else [pytest.mark.thorough],
            id=drill.name,
        )
        for drill in LAUNCHER_DRILLS
    ],
)
def test_launcher_drill(drill: LauncherDrill) -> None:
    assert rehearse_launcher(drill, slack=5.0).left == []
