"""Training goes on with the survivors, from the last checkpoint, as one process would have."""

from pathlib import Path

import pytest
from launch import rank_outcomes, run_ranks
from surviving_training import LIMIT_S, train
from survivors_of import survivors_of

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("backend", "nprocs", "sharded"),
    [
        ("native", 3, True),
        ("gloo", 2, False),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("native", 3, False),
                ("native", 4, True),
                ("gloo", 3, True),
                ("gloo", 4, False),
            ]
        ),
    ],
)
def test_training_goes_on_from_the_last_checkpoint(
    tmp_path: Path, backend: str, nprocs: int, sharded: bool
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    together.mkdir()
    [(_, expected)] = run_ranks(train, 1, str(alone), backend, sharded, timeout=LIMIT_S)
    outcomes = rank_outcomes(train, nprocs, str(together), backend, sharded, timeout=LIMIT_S)
    for size, values in survivors_of(outcomes, [1]):
        assert size == nprocs - 1
        # Sums over ranks are rounded in another order.
        assert values == pytest.approx(expected, rel=1e-9)
