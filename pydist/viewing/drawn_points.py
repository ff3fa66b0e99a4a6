"""Which points of a long curve are drawn: few, but every extreme.

The steps are cut into spans. Of each, the first point, the lowest, the highest and the last are
kept, and the first one that is not a finite number, which the curve shows as a gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Four points and a gap a span: wider than any screen shows pixels.
SPANS = 500


def drawn_points(values: Sequence[float | None], spans: int = SPANS) -> list[int]:
    """The places of the points to draw, ascending.

    Args:
        values: Of a curve; None where a step has none: such points are never drawn.
        spans: Into how many pieces it is cut. Curves of at most four times as many points are kept
            whole.
    """
    there = [place for place, value in enumerate(values) if value is not None]
    if len(there) <= 4 * spans:
        return there
    kept: set[int] = set()
    for span in range(spans):
        places = there[span * len(there) // spans : (span + 1) * len(there) // spans]
        finite = [place for place in places if _is_finite(values[place])]
        broken = next((place for place in places if not _is_finite(values[place])), None)
        if broken is not None:
            kept.add(broken)
        if finite:
            kept |= {
                finite[0],
                finite[-1],
                min(finite, key=lambda place: values[place] or 0.0),
                max(finite, key=lambda place: values[place] or 0.0),
            }
    return sorted(kept)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
