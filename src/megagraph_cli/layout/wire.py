"""Bytes that a training step puts on the wire, exactly: what the runtime sends, checked against it by test.

All functions count what the ranks of a group send together. A message counts once; collectives count as their
bandwidth-optimal algorithms move them: of n bytes on each of g ranks, a sum moves 2 (g - 1) n, a gather g (g - 1) n,
an all-to-all and a broadcast (g - 1) n. Headers and rendezvous are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

ID_BYTES = 8
"""Ids and counts are int64."""


def all_reduce_bytes(message_bytes: int, group_size: int) -> int:
    return 2 * (group_size - 1) * message_bytes


def all_gather_bytes(own_bytes: int, group_size: int) -> int:
    return group_size * (group_size - 1) * own_bytes


def all_to_all_bytes(own_bytes: int, group_size: int) -> int:
    return (group_size - 1) * own_bytes


def broadcast_bytes(message_bytes: int, group_size: int) -> int:
    return (group_size - 1) * message_bytes


@dataclass(frozen=True)
class AttentionSizes:
    """One attention call on one of ``cp`` ranks: ``microbatch`` sequences of ``rows`` rows, ``hidden_dim``, heads.

    ``itemsize`` of queries, keys and values (2 under bfloat16 autocast), ``stats_itemsize`` of softmax statistics and
    of sums of dK/dV; ``empty`` ranks hold nothing but padding.
    """

    cp: int
    microbatch: int
    rows: int
    hidden_dim: int
    num_heads: int
    itemsize: int
    stats_itemsize: int
    empty: int = 0

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one rank's rows."""
        return 2 * self.microbatch * self.rows * self.hidden_dim * self.itemsize

    @property
    def kv_grad_bytes(self) -> int:
        """Their gradients."""
        return 2 * self.microbatch * self.rows * self.hidden_dim * self.stats_itemsize

    @property
    def query_bytes(self) -> int:
        """The target rows' queries."""
        return self.microbatch * self.hidden_dim * self.itemsize


def layer_bytes(sizes: AttentionSizes, context: str) -> tuple[int, int]:
    """(forward, backward) bytes of one layer's attention over a context group.

    A ring's forward takes K/V round in cp - 1 hops; its backward does so again while dK/dV make as many, a hop behind,
    the last one home; blocks of padding alone do not travel. Gathered, K/V come at once each way, and dK/dV go to their
    owners at once.
    """
    if sizes.cp == 1:
        return 0, 0
    if context == "ring":
        blocks = sizes.cp - sizes.empty
        forward = (sizes.cp - 1) * blocks * sizes.kv_bytes
        return forward, forward + (sizes.cp - 1) * blocks * sizes.kv_grad_bytes
    gathered = all_gather_bytes(sizes.kv_bytes, sizes.cp)
    return gathered, gathered + all_to_all_bytes(sizes.cp * sizes.kv_grad_bytes, sizes.cp)


def last_layer_bytes(sizes: AttentionSizes) -> tuple[int, int]:
    """(forward, backward) bytes of the last layer: the target row's query to all, their partial results to all."""
    if sizes.cp == 1:
        return 0, 0
    partial_bytes = sizes.microbatch * (sizes.hidden_dim + sizes.num_heads) * sizes.stats_itemsize
    forward = broadcast_bytes(sizes.query_bytes, sizes.cp) + all_gather_bytes(partial_bytes, sizes.cp)
    return forward, broadcast_bytes(sizes.query_bytes, sizes.cp) + all_reduce_bytes(sizes.query_bytes, sizes.cp)


def context_bytes(sizes: AttentionSizes, layers: int, *, last: bool, recompute: str, context: str) -> int:
    """Bytes of one micro-batch on one stage's context group: ``layers`` layers, the model's last among them or not."""
    forward, backward = layer_bytes(sizes, context)
    last_forward, last_backward = last_layer_bytes(sizes)
    middle = layers - int(last)
    runs = 2 if recompute == "full" else 1
    return middle * (runs * forward + backward) + int(last) * (runs * last_forward + last_backward)


def boundary_bytes(x_bytes: int, num_stages: int, num_microbatches: int) -> int:
    """One replica's and context rank's x ``x_bytes`` down and its gradient up, over every boundary of the pipeline."""
    return 2 * (num_stages - 1) * num_microbatches * x_bytes


def gradient_bytes(own: int, shared: int, itemsize: int, *, num_stages: int, sharers: int) -> int:
    """Sums of the gradients of ``own`` parameters of all stages and ``shared`` ones that each stage holds.

    ``sharers`` = dp x cp: the size of a ``loss`` group, of which there is one for each stage.
    """
    over_loss = all_reduce_bytes((own + num_stages * shared) * itemsize, sharers)
    return over_loss + sharers * all_reduce_bytes(shared * itemsize, num_stages)


def table_bytes(rows: int, hidden_dim: int, itemsize: int, sharers: int) -> int:
    """Touched rows of an embedding table with their ids; ``rows`` is the most that a rank of the group touched."""
    if sharers == 1:
        return 0
    return all_reduce_bytes(ID_BYTES, sharers) + all_gather_bytes(rows * (ID_BYTES + hidden_dim * itemsize), sharers)


def summary_bytes(world_size: int) -> int:
    """[loss, gradient norm, stop votes] in float64, summed over all workers."""
    return all_reduce_bytes(3 * 8, world_size)
