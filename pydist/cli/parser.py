"""The parser of the command line's flags: one line for what is wrong."""

import argparse
from typing import NoReturn

from pydist.errors import InvalidUsage


class Parser(argparse.ArgumentParser):
    """argparse's, but a wrong flag raises an InvalidUsage."""

    def error(self, message: str) -> NoReturn:
        raise InvalidUsage(f"{message} (`{self.prog} --help` lists what there is)")
