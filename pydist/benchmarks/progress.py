"""What is being measured at the moment, on standard error."""

import os
import sys
import time
from typing import TextIO

# Between two updates; writing costs more than a small collective.
_INTERVAL_S = 0.2


class Progress:
    """On a terminal one line that changes; elsewhere a line for each phase.

    Args:
        is_on: whether anything is said; ranks but the first one are silent.
        stream: by default standard error, so that the report can be sent to a file.
    """

    def __init__(self, is_on: bool = True, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_on = is_on
        self._is_terminal = is_on and self._stream.isatty()
        self._phase = ""
        self._next_s = 0.0

    def phase(self, text: str) -> None:
        """Something else is measured from now on."""
        self._phase = text
        if self._is_terminal:
            self._rewrite(text)
        elif self._is_on:
            print(f"  {text}", file=self._stream, flush=True)

    def detail(self, text: str) -> None:
        """How far it is; may be called as often as one likes."""
        if self._is_terminal and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _INTERVAL_S
            self._rewrite(f"{self._phase}: {text}" if self._phase else text)

    def clear(self) -> None:
        """Nothing is measured any more."""
        if self._is_terminal:
            self._rewrite("")

    def _rewrite(self, text: str) -> None:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 80
        self._stream.write(f"\r\x1b[K{text[: columns - 1]}")
        self._stream.flush()
