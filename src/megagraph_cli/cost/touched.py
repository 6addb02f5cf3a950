"""The rows of an embedding table that a step touches: what they take and what of them travels."""

from __future__ import annotations

from dataclasses import dataclass

from megagraph_cli.layout.pieces import num_pieces
from megagraph_cli.layout.wire import ID_BYTES


@dataclass(frozen=True)
class Touched:
    """As ``parallel/table.py`` and ``parallel/row_adamw.py`` hold them.

    ``rows`` that a rank touches at most, each of the ``sharers`` ranks so many, of a table [``table_rows``, ``dim``].
    All 0 where a stage has no table. ``device`` is the kind that the pieces are for.
    """

    rows: int = 0
    sharers: int = 1
    table_rows: int = 0
    dim: int = 0
    itemsize: int = 0
    device: str = "cpu"

    @property
    def row_bytes(self) -> int:
        return self.dim * self.itemsize

    @property
    def _summed_rows(self) -> int:
        return min(self.sharers * self.rows, self.table_rows)

    @property
    def counts_bytes(self) -> int:
        """How often each row of the table was updated: 32-bit numbers that stay."""
        return 4 * self.table_rows

    @property
    def passing_bytes(self) -> int:
        """Held while micro-batches go through: rows and ids of those that came back."""
        return self.rows * (self.row_bytes + ID_BYTES)

    @property
    def summed_bytes(self) -> int:
        """Rows and ids of the sum over all sharers."""
        return self._summed_rows * (self.row_bytes + ID_BYTES)

    @property
    def gathers(self) -> int:
        """In how many pieces rows are exchanged; none where one rank has the whole gradient."""
        return num_pieces(self.rows, self.dim, self.rows, self.device) if self.rows and self.sharers > 1 else 0

    @property
    def gathered_bytes(self) -> int:
        """A piece's rows of all sharers."""
        return self.sharers * -(-self.rows // self.gathers) * self.row_bytes if self.gathers else 0

    @property
    def gathered_ids_bytes(self) -> int:
        """All sharers' ids, which are exchanged at once."""
        return self.sharers * self.rows * ID_BYTES if self.gathers else 0

    @property
    def merged_bytes(self) -> int:
        """All sharers' rows, which each of them adds up."""
        return self.sharers * self.rows * self.row_bytes if self.gathers else 0

    @property
    def updates(self) -> int:
        """In how many pieces the sum is applied."""
        return num_pieces(self._summed_rows, self.dim, self.rows, self.device) if self.rows else 0

    @property
    def updated_bytes(self) -> int:
        """Rows of the sum."""
        return self._summed_rows * self.row_bytes

    @property
    def exchange_bytes(self) -> int:
        """Held beside the sum while it is made: a rank's own, all ids' slots, and a piece with what gloo copies aside.

        Gloo lets go late: what each of its two threads copied last may be there at once.
        """
        if not self.gathers:
            return 0
        return self.passing_bytes + self.gathered_ids_bytes + self.gathered_bytes + self.late_bytes

    @property
    def late_bytes(self) -> int:
        """What gloo may still hold when the sum is applied: the last piece and its copy. NCCL copies nothing."""
        return 2 * self.gathered_bytes if self.device == "cpu" else 0

    @property
    def update_bytes(self) -> int:
        """Held beside the sum while a piece of it is applied: gradient, two moments, rows; ids, counts, corrections.

        And what gloo let go of late.
        """
        if not self.rows:
            return 0
        piece = -(-self._summed_rows // self.updates)
        return piece * (4 * self.row_bytes + 5 * ID_BYTES) + self.late_bytes
