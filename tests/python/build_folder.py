"""Where the build under test lies: the Makefile says so in TEST_BUILD."""

import os
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / os.environ.get("TEST_BUILD", "build/dev")
