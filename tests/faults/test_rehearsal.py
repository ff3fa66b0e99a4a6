"""What is asked of the ranks of a drill: that they blame the right one."""

from pathlib import Path
from typing import Any

import pytest
from rank_process import Outcome
from rehearsal import judge
from scene import Drill, FailedDrillError, Report


def nothing(_: Any) -> None:
    pass


# Of rank 1, who is the victim.
@pytest.mark.parametrize(
    ("blames", "ranks", "is_right"),
    [
        ("victim", (1,), True),
        ("victim", (0,), False),
        ("victim", (0, 1), False),
        ("victim", (), False),
        ("victim and another", (0, 1), True),
        ("victim and another", (1,), False),
        ("victim and another", (0, 2), False),
        ("nobody", (), True),
        ("nobody", (1,), False),
    ],
)
def test_an_error_must_blame_the_victim_and_not_only_mention_it(
    tmp_path: Path, blames: Any, ranks: tuple[int, ...], is_right: bool
) -> None:
    (tmp_path / "fault").write_text("0.0")
    drill = Drill("a drill", nothing, ("PeerLost",), blames=blames, victim="killed")
    report = Report("PeerLost", "rank 0 has died. rank 1 waited for it", ranks, 0.5, [])
    outcomes = [Outcome(0, report), Outcome(1, exit_code=-9)]
    if is_right:
        assert judge(drill, outcomes, tmp_path, 1.0).seconds == 0.5
    else:
        with pytest.raises(FailedDrillError, match="blames"):
            judge(drill, outcomes, tmp_path, 1.0)
