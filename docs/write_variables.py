"""Writes the table of variables.md from where the engine declares them (csrc/base/env.cc)."""

from pathlib import Path

from pydist import _native

PAGE = Path(__file__).with_name("variables.md")
BEGIN = "<!-- begin: written by write_variables.py -->\n"
END = "<!-- end -->\n"


def table() -> str:
    rows = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for name, values, default, meaning, _ in _native.environment_variables():
        shown = f"`{default}`" if default else "none"
        rows.append(f"| `{name}` | {values.replace(' |', ',')} | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"


def written(page: str) -> str:
    """The page with the table as it should be."""
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + table() + END + tail


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
