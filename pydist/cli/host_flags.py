"""The flags of `pydist run` for jobs on several hosts."""

import argparse

__all__ = ["add_host_flags"]


def add_host_flags(parser: argparse.ArgumentParser) -> None:
    """Adds -H, --hostfile and what goes with them."""
    flags = parser.add_argument_group(
        "several hosts",
        "Starts torchrun on each host through ssh, which must need no password, in the same folder "
        "with the same Python, which must be there too. Every line that a rank prints gets its "
        "rank in front. When one host ends, or this command, all end.",
    )
    flags.add_argument(
        "-H",
        "--hosts",
        metavar="HOSTS",
        help="the hosts, each with how many processes it may have: a:4,b:4; user@a, [fd00::1]:2",
    )
    flags.add_argument(
        "--hostfile", metavar="FILE", help="the same from a file, a line each: a slots=4"
    )
    flags.add_argument(
        "-np",
        dest="processes",
        metavar="N",
        type=_count,
        help="how many processes in all; they fill the hosts in their order (default: as many as "
        "the hosts may have, one where that is not said)",
    )
    flags.add_argument(
        "-x",
        dest="exported",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="a variable for the ranks of all hosts, with this command's value or another one; may "
        "be repeated. PYTHONPATH, CUDA_VISIBLE_DEVICES and those that begin with PYDIST_, OMP_, "
        "NCCL_ or GLOO_ go there anyway",
    )
    flags.add_argument("-p", "--ssh-port", metavar="PORT", type=_count, help="ssh's port")
    flags.add_argument(
        "--ssh-args", metavar="ARGS", default="", help='more for ssh, such as "-i key -l user"'
    )


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is no number, 1 or more")
    return int(text)
