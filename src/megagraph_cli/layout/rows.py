"""Which rows of a sequence live on which context rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowLayout:
    """Rows of a sequence, ``[nodes | super nodes | global tokens | padding]``, cut into cp equal blocks.

    Every row of a sequence, super nodes and global tokens included, lives on exactly one rank (a departure from
    the paper, which replicates super nodes). ``rows_per_rank`` = ceil(S / cp); the rows past S are padding: they
    are computed, masked as keys, and counted in time and memory.
    """

    num_sampled: int
    num_super: int
    num_global: int
    cp: int = 1

    @property
    def num_nodes(self) -> int:
        """Rows that are graph nodes (N', the target included)."""
        return self.num_sampled

    @property
    def sequence_rows(self) -> int:
        """S."""
        return self.num_sampled + self.num_super + self.num_global

    @property
    def rows_per_rank(self) -> int:
        """R."""
        return -(-self.sequence_rows // self.cp)

    @property
    def padded_rows(self) -> int:
        return self.rows_per_rank * self.cp

    def rows_of(self, cp_rank: int) -> range:
        """Rows of one rank in the padded sequence."""
        start = cp_rank * self.rows_per_rank
        return range(start, start + self.rows_per_rank)

    @property
    def empty_ranks(self) -> frozenset[int]:
        """Ranks that hold nothing but padding."""
        return frozenset(rank for rank in range(self.cp) if self.rows_of(rank).start >= self.sequence_rows)
