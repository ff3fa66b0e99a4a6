"""Prints tables of the command line."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

__all__ = ["print_whole"]


def print_whole(text: str | Table) -> None:
    """Prints a table as wide as it is: rich would cut columns off to fit a narrow terminal."""
    console = Console(highlight=False, markup=False)
    if isinstance(text, Table):
        options = console.options.update(max_width=1000)
        console.width = max(console.width, Measurement.get(console, options, text).maximum)
    console.print(text, soft_wrap=isinstance(text, str))
