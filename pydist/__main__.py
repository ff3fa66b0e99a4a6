"""`python -m pydist`."""

import sys

from pydist.cli import main

sys.exit(main())
