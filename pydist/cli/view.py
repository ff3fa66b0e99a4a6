"""`pydist view`: one page over the runs that `pydist.monitor` has written."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from pydist.cli.parser import Parser
from pydist.errors import InvalidUsage
from pydist.monitoring.whole_file import write_whole
from pydist.viewing.page import make_page
from pydist.viewing.run_folders import find_runs

_DESCRIPTION = """\
Writes one HTML file over the runs in some folders, and in folders below: curves of loss, speed and
waiting over each other, the slowest rank of each run, in what their configurations differ, and the
last step of their traces (PYDIST_TIMELINE). The file has everything in it: it needs no server and
no network, and can be sent to others.
"""


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="pydist view",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="of runs, or of one run")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page; default: view.html in the first folder",
    )
    parser.add_argument("--open", action="store_true", help="show it in a browser")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Writes the page.

    Args:
        arguments: folders, and flags.

    Returns:
        0; 1 where the page is written and no browser can be started.

    Raises:
        InvalidUsage: a folder is not there, none holds a run, or the page can't be written.
    """
    options = _parser().parse_args(list(arguments))
    folders = find_runs(options.folders)
    page = make_page(folders)
    path = options.output or Path(options.folders[0]) / "view.html"
    try:
        # What UTF-8 can't have, of the names of files say, becomes "?".
        write_whole(path, page.encode(errors="replace"))
    except OSError as error:
        raise InvalidUsage(
            f"the page can't be written to {os.fspath(path)!r}: {error}. Name another with -o FILE."
        ) from error
    print(f"{len(folders)} {'run' if len(folders) == 1 else 'runs'}: {path}")
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        print(f"pydist view: found no browser to open {path} with", file=sys.stderr)
        return 1
    return 0
