"""Short rollout videos that any browser plays: H.264, 4:2:0, index at the front, a few tens of kilobytes.

Small camera pictures are enlarged by a whole factor without smoothing, so that 64 pixels can be watched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_embodied.errors import ConfigError

_MIN_SIDE = 192


def write_video(path: str | Path, frames: Sequence[NDArray[np.uint8]], fps: float) -> Path:
    """Writes an mp4 file.

    Args:
        path: File to write; replaced in one step.
        frames: Pictures, uint8 `[H, W, 3]`, all of one size.
        fps: Pictures per second.

    Returns:
        The file.

    Raises:
        ConfigError: No frames, or frames of another shape.
    """
    import av

    path = Path(path)
    if not frames or any(frame.shape != frames[0].shape or frame.shape[-1] != 3 for frame in frames):
        shapes = sorted({frame.shape for frame in frames})
        raise ConfigError("a video needs RGB frames of one size", where=path, found=shapes, expected="[H, W, 3]")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with av.open(str(temporary), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            height, width = _enlarge(frames[0]).shape[:2]
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.options = {"crf": "26", "preset": "medium"}
            for frame in frames:
                picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(_enlarge(frame)), format="rgb24")
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _enlarge(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Enlarges to at least 192 pixels and crops to even sides, which 4:2:0 needs."""
    factor = max(1, -(-_MIN_SIDE // min(frame.shape[:2])))
    large = frame.repeat(factor, axis=0).repeat(factor, axis=1)
    return large[: large.shape[0] // 2 * 2, : large.shape[1] // 2 * 2]
