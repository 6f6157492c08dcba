"""Draws the tabletop: squares and a cross with soft edges, so that a position shows to a fraction of a pixel.

The coverage of an axis-aligned square is the outer product of two coverages of an interval, so a shape costs two
short vectors and one blend of a small patch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_TABLE = np.array((70, 60, 55), dtype=np.float32)
_PAD_COLOURS = np.array(((40, 90, 235), (235, 235, 235)), dtype=np.float32)
_BLOCK_COLOURS = np.array(((225, 40, 40), (40, 190, 70)), dtype=np.float32)
_OPEN, _CLOSED = np.array(((0, 225, 225), (255, 0, 255)), dtype=np.float32)
PAD_HALF, BLOCK_HALF = 0.085, 0.06
_ARM, _HALF_WIDTH = 0.065, 0.016


def draw_scene(
    size: int,
    pads: NDArray[np.float64],
    blocks: NDArray[np.float64],
    gripper: NDArray[np.float64],
    *,
    closed: bool,
) -> NDArray[np.uint8]:
    """Draws a table seen from above, y upwards.

    Args:
        size: Width and height in pixels.
        pads: Centres `[2, 2]` in the unit square.
        blocks: Centres `[2, 2]`.
        gripper: Centre `[2]`; drawn as a cross.
        closed: Colours the gripper magenta instead of cyan.

    Returns:
        `[size, size, 3]`.
    """
    canvas = np.empty((size, size, 3), dtype=np.float32)
    canvas[:] = _TABLE
    for centre, colour in zip(pads, _PAD_COLOURS, strict=True):
        _rectangle(canvas, centre, (PAD_HALF, PAD_HALF), colour)
    for centre, colour in zip(blocks, _BLOCK_COLOURS, strict=True):
        _rectangle(canvas, centre, (BLOCK_HALF, BLOCK_HALF), colour)
    colour = _CLOSED if closed else _OPEN
    _rectangle(canvas, gripper, (_ARM, _HALF_WIDTH), colour)
    _rectangle(canvas, gripper, (_HALF_WIDTH, _ARM), colour)
    return (canvas + 0.5).astype(np.uint8)


def _rectangle(
    canvas: NDArray[np.float32], centre: NDArray[np.float64], half: tuple[float, float], colour: NDArray[np.float32]
) -> None:
    size = len(canvas)
    left, columns = _coverage(float(centre[0]) * size, half[0] * size, size)
    top, rows = _coverage((1.0 - float(centre[1])) * size, half[1] * size, size)
    patch = canvas[top : top + len(rows), left : left + len(columns)]
    alpha = (rows[:, None] * columns)[..., None]
    patch += alpha * (colour - patch)


def _coverage(centre: float, half: float, size: int) -> tuple[int, NDArray[np.float32]]:
    """First pixel and share of each pixel that the interval `centre ± half` covers; the interval spans two or more."""
    low, high = max(0.0, centre - half), min(float(size), centre + half)
    if high <= low:
        return 0, np.empty(0, dtype=np.float32)
    first, last = int(low), min(int(high), size - 1)
    shares = np.ones(last - first + 1, dtype=np.float32)
    shares[0] = first + 1 - low
    shares[-1] = high - last
    return first, shares
