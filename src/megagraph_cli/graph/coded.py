"""Draws by similarity of dense features through the rows' codes (nibbles.py): the nodes that the rows would give, from
less memory.

Tries sit in two halves of seats. While the proposals of one half are compared with their targets, what those of the
other are read from is on its way. Most proposals are refused by the upper plane of their code: these are drawn,
compared and judged in loops of vector instructions without a branch, and only the seats that call are looked at one by
one. All seats go along, taken or not, so a handful of tries alone takes longer than one after another would.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from megagraph_cli.graph.nibbles import ERROR, OFFSET, SCALE, UPPER_ERROR, digits_dot, plane_bytes, read_codes
from megagraph_cli.graph.prefetch import prefetch, prefetch_once
from megagraph_cli.graph.products import dense_dot
from megagraph_cli.graph.streams import GOLDEN, HALF, UNIFORM_SHIFT, UNIT, Place, mix

MAX_PROPOSALS = 256
_SIDE = np.uint64(24)  # seats of a half
_SEATS = np.uint64(48)
_LINE = np.uint64(64)  # bytes of a cache line
_WORD = np.uint64(4)  # bytes of a float32
_ROUNDING = 2.0**-20  # more than float32 scales and norms that are normal numbers can be wrong by, in a cosine
_SCALE_BACK, _UPPER_BACK, _ERROR_BACK = np.uint64(-SCALE), np.uint64(-UPPER_ERROR), np.uint64(-ERROR)
_ALL, _NONE, _ONE, _TWO = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(0), np.uint64(1), np.uint64(2)
_UPPER, _LOWER, _ROWS, _EMPTY = range(4)
"""What of a seat's proposal is looked at, in this order: the upper plane of its code, the lower one, its features; or
nobody sits."""
_REFUSED, _TAKEN, _OPEN = range(3)
"""Verdicts on a proposal. Together with a stage, 0 is what most are: refused by the upper plane."""
_STATE, _DUE, _NODE, _LEVEL, _CALLING = (np.uint64(i) * _SEATS for i in range(5))
"""Where in ``words``: streams; all bits set where a new proposal is due; what is proposed, and its level as a multiple
of 2^-53; the seats that call, one after another."""
_LEFT, _STAGE, _VERDICT, _TRY, _CALLS = (np.uint64(i) * _SEATS for i in range(5))
"""Where in ``marks``: how many more proposals there may be; stages; verdicts; tries; whether a seat calls."""
_PRODUCT, _OFFSET, _OWN_SCALE, _OWN_ERROR, _ITS_SCALE, _ITS_ERROR = (np.uint64(i) * _SEATS for i in range(6))
"""Where in ``reals``: the product of target and proposal, what of it is due to the digits' offset, the target's scale
and error, the proposal's."""


class Seats(NamedTuple):
    """Seats of tries whose proposals are under way.

    ``words`` uint64, ``marks`` int64 and ``reals`` float64 hold some numbers of each seat, ``codes`` int8 the codes of
    their targets. Flat and few: an array is handed over to a call as seven words, and what lies in one array is known
    not to overlap.
    """

    words: NDArray[np.uint64]
    marks: NDArray[np.int64]
    reals: NDArray[np.float64]
    codes: NDArray[np.int8]


class CodeTable(NamedTuple):
    """The coded rows of all nodes: ``planes`` uint8, and ``tails`` the same memory as float32, both flat.

    A row has ``width`` bytes, a plane of it ``plane``; it codes ``columns`` features.
    """

    planes: NDArray[np.uint8]
    tails: NDArray[np.float32]
    width: np.uint64
    plane: np.uint64
    columns: int


class Rows(NamedTuple):
    """The feature rows themselves, in ``x`` or as float16 patterns in ``half``, and one over their ``norm``."""

    x: NDArray[np.float32]
    half: NDArray[np.uint16]
    norm: NDArray[np.float32]


@njit(nogil=True, cache=True)
def make_seats(columns: int) -> Any:
    """Empty seats for comparisons of so many features. Their proposals, which are compared too, are node 0."""
    return Seats(
        np.zeros(5 * _SEATS, np.uint64),
        np.zeros(5 * _SEATS, np.int64),
        np.zeros(6 * _SEATS, np.float64),
        np.zeros(_SEATS * _TWO * np.uint64(plane_bytes(columns)), np.int8),
    )


@njit(nogil=True, cache=True)
def code_table(code: NDArray[np.uint8], tails: NDArray[np.float32], columns: int) -> Any:
    """Of code rows [N, width] and the same memory as float32."""
    plane = np.uint64(plane_bytes(columns))
    return CodeTable(code.reshape(-1), tails.reshape(-1), np.uint64(code.shape[1]), plane, columns)


@njit(nogil=True, cache=True, forceinline=True)
def _propose(seats: Any, first: np.uint64, num_nodes: np.uint64) -> None:
    """Draw the next proposals of a half where one is due, as streams.below and streams.uniform would."""
    words, marks = seats.words, seats.marks
    for i in range(_SIDE):
        s = first + i
        due = words[_DUE + s]
        step = GOLDEN & due
        once = words[_STATE + s] + step
        twice = once + step
        words[_STATE + s] = twice
        node, level = ((mix(once) >> HALF) * num_nodes) >> HALF, mix(twice) >> UNIFORM_SHIFT
        words[_NODE + s] = (node & due) | (words[_NODE + s] & ~due)
        words[_LEVEL + s] = (level & due) | (words[_LEVEL + s] & ~due)
    for i in range(_SIDE):
        s = first + i
        marks[_LEFT + s] += np.int64(words[_DUE + s])  # -1 where one is due


@njit(nogil=True, cache=True, forceinline=True)
def _compare(seats: Any, table: Any, first: np.uint64, other: np.uint64) -> None:
    """Products of the upper planes of a half's proposals with their targets' codes, and what is beside the planes.

    What the other half's are read from is asked for between them: all at once, each would wait for the places of the
    others' pages to be looked up.
    """
    words, reals, codes = seats.words, seats.reals, seats.codes
    planes, tails, width, plane = table.planes, table.tails, table.width, table.plane
    for i in range(_SIDE):
        s, place = first + i, words[_NODE + first + i] * width
        ahead = words[_NODE + other + i] * width
        for byte in range(_NONE, plane, _LINE):
            prefetch_once(planes, ahead + byte)
        own = s * plane * _TWO
        if plane == _LINE:  # as most often: with a size that is known when this is compiled, there is no loop
            product = digits_dot(planes, place, codes, own, _LINE)
        else:
            product = digits_dot(planes, place, codes, own, plane)
        reals[_PRODUCT + s] = np.float64(product)
        end = (place + plane) // _WORD
        reals[_ITS_SCALE + s], reals[_ITS_ERROR + s] = tails[end - _SCALE_BACK], tails[end - _UPPER_BACK]


@njit(nogil=True, cache=True)
def _margin(own: float, its: float) -> float:
    """How far the cosine of two codes may be from the rows', which are these parts of their norms away from them."""
    return own + its + own * its + _ROUNDING


@njit(nogil=True, cache=True, forceinline=True)
def _judge(seats: Any, first: np.uint64) -> np.uint64:
    """The verdicts of the upper planes; lists the seats of a half that call for more than another proposal."""
    words, marks, reals = seats.words, seats.marks, seats.reals
    for i in range(_SIDE):
        s = first + i
        # A digit of the upper plane counts sixteen times.
        product = 16.0 * (reals[_PRODUCT + s] - reals[_OFFSET + s])
        cosine = reals[_OWN_SCALE + s] * reals[_ITS_SCALE + s] * product
        margin = _margin(reals[_OWN_ERROR + s], reals[_ITS_ERROR + s])
        level = np.float64(words[_LEVEL + s]) * UNIT
        unless_refused = _TAKEN if cosine - margin > level else _OPEN
        verdict, stage = _REFUSED if cosine + margin < level else unless_refused, marks[_STAGE + s]
        marks[_VERDICT + s] = verdict
        marks[_CALLS + s] = np.int64(((verdict | stage) != 0 or marks[_LEFT + s] == 0) and stage != _EMPTY)
    calling = _NONE
    for i in range(_SIDE):
        s = first + i
        words[_CALLING + calling] = s
        calling += np.uint64(marks[_CALLS + s])
    return calling


@njit(nogil=True, cache=True, forceinline=True)
def _seat(seats: Any, table: Any, s: np.uint64, b: Place, state: np.uint64, target: np.uint64) -> None:
    """Let try ``b`` have its proposals under way: keep what of its target's code they are compared with."""
    words, marks, reals = seats.words, seats.marks, seats.reals
    place, own = target * table.width, s * table.plane * _TWO
    total = read_codes(table.planes, place, seats.codes, own, table.columns, table.plane)
    end = (place + table.plane) // _WORD
    reals[_OFFSET + s] = OFFSET * total
    reals[_OWN_SCALE + s], reals[_OWN_ERROR + s] = table.tails[end - _SCALE_BACK], table.tails[end - _ERROR_BACK]
    words[_STATE + s], words[_DUE + s] = state, _ALL
    marks[_LEFT + s], marks[_STAGE + s], marks[_TRY + s] = MAX_PROPOSALS, _UPPER, b


@njit(nogil=True, cache=True, forceinline=True)
def _look_closer(seats: Any, table: Any, s: np.uint64) -> int:
    """The verdict of both planes, of which the upper was compared just now."""
    reals, plane = seats.reals, table.plane
    place = seats.words[_NODE + s] * table.width
    lower = np.float64(digits_dot(table.planes, place + plane, seats.codes, s * plane * _TWO, plane))
    product = 16.0 * (reals[_PRODUCT + s] - reals[_OFFSET + s]) + (lower - reals[_OFFSET + s])
    cosine = reals[_OWN_SCALE + s] * reals[_ITS_SCALE + s] * product
    margin = _margin(reals[_OWN_ERROR + s], np.float64(table.tails[(place + plane) // _WORD - _ERROR_BACK]))
    level = np.float64(seats.words[_LEVEL + s]) * UNIT
    return _TAKEN if cosine - margin > level else (_REFUSED if cosine + margin < level else _OPEN)


@njit(nogil=True, cache=True)
def _look_at_features(rows: Any, target: int, node: int, level: float) -> int:
    """The verdict of the features themselves."""
    bound = np.float64(rows.norm[target]) * np.float64(rows.norm[node])
    return _TAKEN if bound > 0.0 and level * bound < dense_dot(rows.x, rows.half, target, node) else _REFUSED


@njit(nogil=True, cache=True)
def _fetch_features(rows: Any, target: int, node: int) -> None:
    """Have on their way what ``_look_at_features`` reads."""
    prefetch(rows.norm, node)
    for column in range(0, rows.x.shape[1], 16):  # entries of a line
        prefetch_once(rows.x, node * rows.x.shape[1] + column)
        prefetch(rows.x, target * rows.x.shape[1] + column)
    for column in range(0, rows.half.shape[1], 32):
        prefetch_once(rows.half, node * rows.half.shape[1] + column)
        prefetch(rows.half, target * rows.half.shape[1] + column)


@njit(nogil=True, cache=True)
def similar_coded(block: Any, seats: Any, active: NDArray[np.int64], table: Any, rows: Any) -> None:
    """Nodes for the ``active`` tries of ``block``, a tries.Block: uniform proposals, accepted with the cosine.

    The upper digits decide where the cosine is further from the level than what they leave out can account for, all
    eight bits where it is further than rounding; the rows themselves are read about once in fifty proposals.
    """
    words, marks, target, state = seats.words, seats.marks, block.target, block.state
    planes, width, plane = table.planes, table.width, table.plane
    num_nodes, count = np.uint64(rows.norm.shape[0]), np.uint64(active.shape[0])
    for s in range(_SEATS):
        marks[_STAGE + s], words[_DUE + s] = _EMPTY, _NONE
    sitting = min(count, _SEATS)
    started = sitting
    for i in range(sitting):
        b = np.uint64(active[i])
        _seat(seats, table, (i & _ONE) * _SIDE + (i >> _ONE), b, state[b], np.uint64(target[b]))
    first, other = _NONE, _SIDE
    _propose(seats, first, num_nodes)
    _propose(seats, other, num_nodes)
    while sitting > _NONE:
        _compare(seats, table, first, other)
        for i in range(_judge(seats, first)):
            s = words[_CALLING + i]
            b, node, stage, verdict = (
                np.uint64(marks[_TRY + s]),
                words[_NODE + s],
                marks[_STAGE + s],
                marks[_VERDICT + s],
            )
            if stage == _LOWER:
                verdict = _look_closer(seats, table, s)
            elif stage == _ROWS:
                verdict = _look_at_features(rows, target[b], int(node), np.float64(words[_LEVEL + s]) * UNIT)
            if verdict == _OPEN:
                words[_DUE + s], marks[_STAGE + s] = _NONE, stage + 1
                if stage == _UPPER:
                    for byte in range(plane // _LINE * _LINE, plane * _TWO, _LINE):
                        prefetch_once(planes, node * width + byte)
                else:
                    _fetch_features(rows, target[b], int(node))
            elif verdict == _REFUSED and marks[_LEFT + s] > 0:
                words[_DUE + s], marks[_STAGE + s] = _ALL, _UPPER
            else:
                block.node[b] = int(node) if verdict == _TAKEN else -1
                if started < count:
                    b = np.uint64(active[started])
                    _seat(seats, table, s, b, state[b], np.uint64(target[b]))
                    started += _ONE
                else:
                    words[_DUE + s], marks[_STAGE + s] = _NONE, _EMPTY
                    sitting -= _ONE
        _propose(seats, first, num_nodes)
        first, other = other, first
