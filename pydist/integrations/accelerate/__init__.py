"""Accelerate on pydist: one import of a script changes.

from pydist.integrations.accelerate import Accelerator
"""

from pydist.integrations.accelerate.accelerator import Accelerator

__all__ = ["Accelerator"]
