"""Video while it is recorded: each episode is encoded as its frames come and joined to its camera's current mp4 file.

An episode has its own encoder, so it starts with a key frame and can be dropped by dropping its packets; joining costs
no second encoding. Encoder settings are LeRobot's (g = 2, crf 30, yuv420p): near-random access for little size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast

import av
import numpy as np
from av.codec.context import Flags
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from lightning_embodied.errors import ConfigError

VideoCodec = Literal["h264", "hevc", "libsvtav1"]

_ENCODERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    # LeRobot's name -> FFmpeg's encoder and its options; no B frames: at g = 2 they buy nothing and reorder packets
    "h264": ("libx264", {"bf": "0"}),
    "hevc": ("libx265", {"bf": "0", "x265-params": "log-level=none:bframes=0"}),
    "libsvtav1": ("libsvtav1", {"preset": "12"}),
}

CODEC_NAMES = {"h264": "h264", "hevc": "hevc", "libsvtav1": "av1"}
"""What `info.json` calls the codec of a file, by encoder."""


@dataclass(frozen=True)
class VideoSettings:
    """How to encode.

    Attributes:
        codec: `h264`, `hevc` or `libsvtav1`.
        fps: Frames per second.
        gop: Frames from key frame to key frame.
        crf: Constant rate factor; lower is better and larger.
    """

    codec: VideoCodec
    fps: int
    gop: int = 2
    crf: int = 30

    def configure(self, context: av.VideoCodecContext, height: int, width: int) -> None:
        """Sets up an encoder's context."""
        context.height, context.width, context.pix_fmt = height, width, "yuv420p"
        context.time_base, context.framerate = Fraction(1, self.fps), Fraction(self.fps)
        context.options = {**_ENCODERS[self.codec][1], "g": str(self.gop), "crf": str(self.crf)}
        context.gop_size = self.gop
        context.flags |= Flags.global_header

    @property
    def encoder(self) -> str:
        """FFmpeg's name of the encoder."""
        return _ENCODERS[self.codec][0]

    def check(self, key: str, height: int, width: int) -> None:
        """Tries the encoder on one frame.

        Raises:
            ConfigError: FFmpeg lacks it, or it refuses this size.
        """
        if height % 2 or width % 2:
            raise ConfigError(
                "yuv420p video needs an even height and width",
                where=key,
                found=f"{height}x{width}",
                mend="record another size, or give the feature the dtype 'image'",
            )
        try:
            trial = EpisodeVideo(self, height, width)
            trial.add(np.zeros((height, width, 3), dtype=np.uint8))
            trial.finish()
        except (av.FFmpegError, ValueError) as error:
            raise ConfigError(
                "video cannot be encoded with these settings",
                where=key,
                found=f"{self.codec}, {height}x{width}: {error}",
                expected=" or ".join(_ENCODERS),
                mend="choose another vcodec or size",
            ) from error


class EpisodeVideo:
    """The packets of one camera over one episode, in memory.

    Args:
        settings: How to encode.
        height: Of a frame, pixels.
        width: Of a frame, pixels.
    """

    def __init__(self, settings: VideoSettings, height: int, width: int) -> None:
        os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 prints a banner for each encoder otherwise
        self._context = cast(av.VideoCodecContext, av.CodecContext.create(settings.encoder, "w"))
        settings.configure(self._context, height, width)
        self._reformatter = VideoReformatter()  # a frame of its own sets one up each time, slower than its work
        self.frames = 0
        self.packets: list[Any] = []

    def add(self, picture: NDArray[np.uint8]) -> None:
        """Encodes one frame `[H, W, 3]`."""
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        frame = self._reformatter.reformat(frame, format="yuv420p", threads=1)
        frame.pts, frame.time_base = self.frames, self._context.time_base
        self.packets += self._context.encode(frame)
        self.frames += 1

    def finish(self) -> None:
        """Ends the encoding; no frame may follow."""
        self.packets += self._context.encode(None)

    @property
    def nbytes(self) -> int:
        """Size of the packets so far."""
        return sum(packet.size for packet in self.packets)


class VideoFile:
    """One mp4 file that episodes are joined to.

    Args:
        path: Where to write it.
        settings: The settings of all its episodes.
        height: Of a frame, pixels.
        width: Of a frame, pixels.
    """

    def __init__(self, path: Path, settings: VideoSettings, height: int, width: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w", format="mp4")
        # This encoder encodes nothing: opening it gives the header that all episodes' packets share.
        self._stream: Any = self._container.add_stream(settings.encoder, rate=settings.fps)
        settings.configure(cast(av.VideoCodecContext, self._stream.codec_context), height, width)
        self.frames = 0
        self.nbytes = 0

    def append(self, episode: EpisodeVideo) -> None:
        """Joins a finished episode."""
        for packet in episode.packets:
            packet.pts += self.frames
            packet.dts += self.frames
            packet.stream = self._stream
            self._container.mux(packet)
        self.frames += episode.frames
        self.nbytes += episode.nbytes

    def close(self) -> None:
        """Writes the file's index; before, nothing can read it."""
        self._container.close()
