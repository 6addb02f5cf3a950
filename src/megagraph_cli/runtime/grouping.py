"""Which ranks are measured together: groups within a host, and groups that a slow network would run through."""

from __future__ import annotations

from dataclasses import dataclass

from megagraph_cli.artifacts.profile import Link


@dataclass(frozen=True)
class Grouping:
    """``size`` ranks, equally many on each of ``hosts`` and numbered host by host."""

    size: int
    hosts: int

    @property
    def per_host(self) -> int:
        return self.size // self.hosts

    def links(self, degree: int) -> list[Link]:
        """In which placements groups of ``degree`` > 1 ranks are possible."""
        within: list[Link] = ["host"] if degree <= self.per_host else []
        across: list[Link] = ["network"] if self.hosts > 1 and self._crossing(degree) else []
        return within + across

    def pair_links(self) -> list[Link]:
        """In which placements two ranks can send to each other."""
        within: list[Link] = ["host"] if self.per_host > 1 else []
        across: list[Link] = ["network"] if self.hosts > 1 else []
        return within + across

    def pairs(self, link: Link) -> list[list[int]]:
        """Disjoint pairs of ranks that send to each other, on one host or on two neighbouring ones."""
        if link == "host":
            return self.groups(2, link)
        return [
            [host * self.per_host + index, (host + 1) * self.per_host + index]
            for host in range(0, self.hosts - 1, 2)
            for index in range(self.per_host)
        ]

    def _crossing(self, degree: int) -> bool:
        return degree % self.hosts == 0 or degree > self.per_host

    def groups(self, degree: int, link: Link) -> list[list[int]]:
        """As many groups of that degree as fit at the same time, as they would lie in a plan."""
        if link == "host":
            starts = (
                host * self.per_host + start
                for host in range(self.hosts)
                for start in range(0, self.per_host - degree + 1, degree)
            )
            return [list(range(start, start + degree)) for start in starts]
        if degree % self.hosts:  # not equally many on each host: one group over as many hosts as it needs
            return [list(range(degree))]
        share = degree // self.hosts
        return [
            [host * self.per_host + start + index for host in range(self.hosts) for index in range(share)]
            for start in range(0, self.per_host - share + 1, share)
        ]
