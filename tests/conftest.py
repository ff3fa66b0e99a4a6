"""What pytest finds for all tests: their time limits, and SIGINT.

A shell without job control starts `make test &` with SIGINT ignored, and so is it then in every
process that comes of it. The tests send SIGINT to some of these, so it gets Python's own handler
here, and with it wherever a process starts from here.
"""

import signal

from time_limit import pytest_configure, pytest_timeout_cancel_timer, pytest_timeout_set_timer

__all__ = ["pytest_configure", "pytest_timeout_cancel_timer", "pytest_timeout_set_timer"]

signal.signal(signal.SIGINT, signal.default_int_handler)
