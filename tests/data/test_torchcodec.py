"""torchcodec gives the same frames as PyAV, and says the same about frames that are not there."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from lightning_embodied.data.video import DecoderPool
from lightning_embodied.errors import DatasetError, MissingExtraError

VIDEO = Path(__file__).parent.parent / "fixtures/lerobot_v30_video/dataset/videos/observation.images.top"
VIDEO = VIDEO / "chunk-000/file-000.mp4"


def _available():
    try:
        importlib.import_module("torchcodec.decoders")
    except Exception:  # absent, or without FFmpeg's libraries
        return False
    return True


@pytest.mark.skipif(not _available(), reason="torchcodec is not usable here")
def test_same_frames_as_pyav():
    times = [n / 10 for n in (0, 1, 7, 8, 33, 60)]
    ours = DecoderPool("pyav", 10).get(VIDEO, (64, 96)).read(times)
    theirs = DecoderPool("torchcodec", 10).get(VIDEO, (64, 96)).read(times)
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(a.astype(int) - b.astype(int)).max() <= 3
    assert np.array_equal(DecoderPool("auto", 10).get(VIDEO, (64, 96)).read(times), theirs)


@pytest.mark.parametrize(
    "backend", ["pyav", pytest.param("torchcodec", marks=pytest.mark.skipif(not _available(), reason="-"))]
)
@pytest.mark.parametrize("time", [6.1, 0.05, 100.0])
def test_a_time_without_a_frame(backend, time):
    with pytest.raises(DatasetError, match="no frame"):
        DecoderPool(backend, 10).get(VIDEO, (64, 96)).read([time])


@pytest.mark.skipif(_available(), reason="torchcodec is there")
def test_torchcodec_asked_for_and_absent():
    with pytest.raises(MissingExtraError, match="torchcodec"):
        DecoderPool("torchcodec", 10)
    assert DecoderPool("auto", 10).get(VIDEO, (64, 96)).read([0.0])[0].shape == (64, 96, 3)


def test_only_a_bounded_number_of_decoders_stays_open():
    files = sorted(
        (Path(__file__).parent.parent / "fixtures/lerobot_v30_chunks").rglob("observation.images.top/*/*.mp4")
    )
    pool = DecoderPool("pyav", 15, capacity=2)
    first = pool.get(files[0], (64, 64))
    assert pool.get(files[0], (64, 64)) is first
    for path in files[1:3]:
        pool.get(path, (64, 64))
    assert pool.get(files[0], (64, 64)) is not first
