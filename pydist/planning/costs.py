"""What messages and bytes cost between hosts and within one: the alpha-beta-gamma model's numbers.

Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20
(1994), has alpha and beta; Thakur, Rabenseifner and Gropp (see pydist/planning/exchange_time.py)
add gamma. Two more numbers are for what a rank's processor does: with a thousand hosts, a rank that
sends to all of them is busy with messages long before the link is with bytes. Culler et al., "LogP:
towards a realistic model of parallel computation", PPoPP 1993, calls the one for each message o.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydist.errors import InvalidUsage

# Of 1538 bytes that a full frame of 1500 takes on the line, TCP's payload with timestamps.
ETHERNET_PAYLOAD = 1448 / 1538


@dataclass(frozen=True)
class LinkCosts:
    """Between hosts. All seconds.

    Attributes:
        alpha_s: alpha, from sending a message to its arrival, however small it is.
        beta_s_per_byte: beta, for each byte over a host's link, which all its ranks share. A link
            sends and receives at the same time.
        gamma_s_per_byte: gamma, for each arrived byte that a rank combines with its own.
        message_s: Of a rank's processor for each message that it sends and the one that it receives
            in return.
        rank_s_per_byte: Of a rank's processor for each byte that it sends and the one that it
            receives in return.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float
    message_s: float = 0.0
    rank_s_per_byte: float = 0.0


@dataclass(frozen=True)
class HostCosts:
    """Within a host, where ranks share memory. All seconds; each rank moves its bytes by itself.

    Attributes:
        alpha_s: alpha, for all ranks to learn that all have come.
        beta_s_per_byte: beta, for each byte that a rank copies.
        gamma_s_per_byte: gamma, for each byte of another rank that a rank combines with its own.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float


@dataclass(frozen=True)
class Costs:
    """Of a cluster whose hosts and links are alike."""

    link: LinkCosts
    host: HostCosts

    def value(self, name: str) -> float:
        """A number by its name, such as "link.alpha_s"."""
        part, _, attribute = name.partition(".")
        return float(getattr(getattr(self, part), attribute))

    def with_value(self, name: str, value: float) -> Costs:
        """The same with another number."""
        part, _, attribute = name.partition(".")
        if part == "link":
            return replace(self, link=replace(self.link, **{attribute: value}))
        return replace(self, host=replace(self.host, **{attribute: value}))

    def at_rate(self, gbit_per_s: float) -> Costs:
        """The same with an Ethernet link of that speed."""
        return self.with_value("link.beta_s_per_byte", ethernet_beta(gbit_per_s))

    def crowded(self, ranks_per_core: float) -> Costs:
        """The same where ranks share cores, so that all but the link's bytes take so much longer.

        For links without a delay of their own, whose alpha is the time of processors.
        """
        if ranks_per_core <= 1:
            return self
        slower = {name: self.value(name) * ranks_per_core for name in NAMES if name != LINK_BETA}
        costs = self
        for name, value in slower.items():
            costs = costs.with_value(name, value)
        return costs


LINK_BETA = "link.beta_s_per_byte"
NAMES = (
    *(f"link.{field.name}" for field in fields(LinkCosts)),
    *(f"host.{field.name}" for field in fields(HostCosts)),
)


def ethernet_beta(gbit_per_s: float) -> float:
    """Seconds that a byte of TCP's payload takes on Ethernet.

    Args:
        gbit_per_s: The link's rate, 10^9 bits a second.

    Raises:
        InvalidUsage: It is no rate.
    """
    if not 0 < gbit_per_s < math.inf:
        raise InvalidUsage(f"a link of {gbit_per_s} Gbit/s: give a number above 0, such as 25")
    return 8e-9 / (gbit_per_s * ETHERNET_PAYLOAD)


# alpha in seconds by Gbit/s: assumptions, for hosts behind one or two switches that talk TCP.
# Faster links are those of newer hosts.
_ASSUMED_ALPHA_S = {10: 40e-6, 25: 30e-6, 100: 25e-6, 200: 20e-6, 400: 20e-6}
DEFAULT_RATES = tuple(_ASSUMED_ALPHA_S)

# Assumptions, for a core of a present server: two system calls for a message; 27 Gbit/s that one
# rank sends while it receives as much; 10 GB/s that it copies or adds up while its neighbours do.
_ASSUMED_MESSAGE_S = 5e-6
_ASSUMED_RANK_S_PER_BYTE = 0.3e-9
_ASSUMED_GAMMA_S_PER_BYTE = 0.1e-9
_ASSUMED_HOST = HostCosts(alpha_s=5e-6, beta_s_per_byte=0.1e-9, gamma_s_per_byte=0.1e-9)


def default_costs(gbit_per_s: float) -> Costs:
    """What is taken where nothing was measured.

    beta follows from the rate. All other numbers are assumptions: those of the fastest link in
    `DEFAULT_RATES` that is no faster than this one, or of the slowest there.

    Args:
        gbit_per_s: The rate of a host's link.

    Raises:
        InvalidUsage: It is no rate.
    """
    beta = ethernet_beta(gbit_per_s)
    known = max((rate for rate in DEFAULT_RATES if rate <= gbit_per_s), default=DEFAULT_RATES[0])
    link = LinkCosts(
        alpha_s=_ASSUMED_ALPHA_S[known],
        beta_s_per_byte=beta,
        gamma_s_per_byte=_ASSUMED_GAMMA_S_PER_BYTE,
        message_s=_ASSUMED_MESSAGE_S,
        rank_s_per_byte=_ASSUMED_RANK_S_PER_BYTE,
    )
    return Costs(link, _ASSUMED_HOST)


def costs_of(saved: Any, where: str) -> Costs:
    """Costs from JSON that has been read.

    Args:
        saved: A dictionary with "link" and "host".
        where: Names the place, for errors.

    Raises:
        InvalidUsage: Something is missing, unknown, or no number of seconds.
    """
    parts: dict[str, Any] = {}
    for part, kind in (("link", LinkCosts), ("host", HostCosts)):
        values = saved.get(part) if isinstance(saved, dict) else None
        expected = {field.name for field in fields(kind)}
        if not isinstance(values, dict) or set(values) != expected:
            found = sorted(values) if isinstance(values, dict) else values
            raise InvalidUsage(
                f"{where}: {part!r} must hold {', '.join(sorted(expected))}; it holds {found!r}"
            )
        for name, value in values.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (is_number and 0 <= value < math.inf):
                raise InvalidUsage(
                    f"{where}: {part}.{name} is {value!r}; it must be a number of seconds, "
                    "0 or more"
                )
        parts[part] = kind(**{name: float(value) for name, value in values.items()})
    return Costs(**parts)


@dataclass(frozen=True)
class FittedCosts:
    """Costs that were fitted to measurements, as a file keeps them.

    Attributes:
        costs: All of them, with those that were not fitted.
        fitted: Names of those that were.
        ranks: The most that were measured.
        held_out_error: The largest relative error on measurements that the fit has not seen; None
            where there were none.
        about: What was measured, for people.
    """

    costs: Costs
    fitted: tuple[str, ...]
    ranks: int
    held_out_error: float | None
    about: str

    def as_json(self) -> str:
        return json.dumps({"kind": "pydist costs", **asdict(self)}, indent=2) + "\n"

    @staticmethod
    def read(path: Path) -> FittedCosts:
        """What a file keeps.

        Raises:
            InvalidUsage: It can't be read, or is no such file.
        """
        try:
            saved = json.loads(path.read_text())
        except OSError as error:
            raise InvalidUsage(f"{path} can't be read: {error.strerror or error}") from error
        except ValueError as error:
            raise InvalidUsage(f"{path} is no JSON: {error}") from error
        if not isinstance(saved, dict) or saved.get("kind") != "pydist costs":
            raise InvalidUsage(
                f'{path} has no "kind": "pydist costs": give a file that '
                "bench/hosts/fit_model.py has written"
            )
        held_out = saved.get("held_out_error")
        fitted = saved.get("fitted")
        if not isinstance(fitted, list) or not set(fitted) <= set(NAMES):
            raise InvalidUsage(f"{path}: 'fitted' is {fitted!r}; it must list some of {NAMES}")
        ranks = saved.get("ranks")
        if not isinstance(ranks, int):
            raise InvalidUsage(f"{path}: 'ranks' is {ranks!r}; it must be a number of ranks")
        if not isinstance(held_out, float | int | None):
            raise InvalidUsage(
                f"{path}: 'held_out_error' is {held_out!r}; it must be a number, or null"
            )
        costs = costs_of(saved.get("costs"), str(path))
        return FittedCosts(costs, tuple(fitted), ranks, held_out, str(saved.get("about", "")))
