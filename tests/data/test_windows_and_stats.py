"""Windows against a naive reference, statistics against numpy on all values at once."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lightning_embodied.data.images import decode_picture, encode_png
from lightning_embodied.data.stats import PictureHistogram, array_stats
from lightning_embodied.data.windows import clamp_window, window_offsets
from lightning_embodied.errors import DatasetError
from lightning_embodied.features import STATISTICS, Feature


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    steps=st.lists(st.integers(-12, 12), min_size=1, max_size=8),
    fps=st.sampled_from([5, 10, 15, 24, 30, 50]),
    data=st.data(),
)
def test_windows_stay_in_their_episode_and_say_what_is_padding(lengths, steps, fps, data):
    episode = data.draw(st.integers(0, len(lengths) - 1))
    frame = data.draw(st.integers(0, lengths[episode] - 1))
    first = sum(lengths[:episode])
    seconds = [step / fps for step in steps]
    offsets = window_offsets({"action": seconds}, {"action": Feature("float32", (2,))}, fps)["action"]
    frames, is_pad = clamp_window(first + frame, offsets, first, first + lengths[episode] - 1)
    for step, found, padded in zip(steps, frames, is_pad, strict=True):
        wanted = frame + step
        assert padded == (wanted < 0 or wanted >= lengths[episode])
        assert found == first + min(max(wanted, 0), lengths[episode] - 1)


@pytest.mark.parametrize("deltas", [[0.05], [], [0.1, 0.149], [float("nan")]])
def test_deltas_between_frames_are_refused(deltas):
    with pytest.raises(DatasetError, match="multiples of 1 / fps"):
        window_offsets({"action": deltas}, {"action": Feature("float32", (2,))}, 10)


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.int64, np.bool_]),
        st.tuples(st.integers(1, 40), st.integers(1, 3)),
        elements={"min_value": -1000, "max_value": 1000},
    )
)
def test_statistics_of_numbers(values):
    found, exact = array_stats(values), values.astype(np.float64)
    assert found.count == len(values)
    _compare(found, exact)


@settings(deadline=None)
@given(st.lists(hnp.arrays(np.uint8, (3, 4, 3)), min_size=1, max_size=6))
def test_statistics_of_pictures(pictures):
    whole, parts = PictureHistogram(), [PictureHistogram() for _ in range(2)]
    for number, picture in enumerate(pictures):
        whole.add(picture)
        parts[number % 2].add(picture)
    parts[0].merge(parts[1])
    for histogram in (whole, parts[0]):
        assert histogram.stats().count == len(pictures)
        assert histogram.stats().mean.shape == (3, 1, 1)
        _compare(histogram.stats(), np.stack(pictures).reshape(-1, 3) / 255.0)


def _compare(found, exact):
    expected = {"min": exact.min(0), "max": exact.max(0), "mean": exact.mean(0), "std": exact.std(0)}
    expected |= {name: np.quantile(exact, int(name[1:]) / 100, axis=0) for name in STATISTICS if name[0] == "q"}
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name).reshape(-1), value, rtol=1e-9, atol=1e-12, err_msg=name)


@settings(deadline=None)
@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 20), st.integers(1, 20), st.just(3))))
def test_png_is_lossless_and_others_can_read_it(picture):
    data = encode_png(picture)
    assert np.array_equal(decode_picture(data, "here"), picture)
    with av.open(io.BytesIO(data)) as container:
        assert np.array_equal(next(container.decode(video=0)).to_ndarray(format="rgb24"), picture)


def test_jpeg_pictures_are_read():
    rows, columns = np.mgrid[:32, :48]
    picture = np.stack([rows * 4, columns * 4, rows + columns], axis=-1).astype(np.uint8)
    context = av.CodecContext.create("mjpeg", "w")
    context.height, context.width, context.pix_fmt, context.time_base = 32, 48, "yuvj444p", Fraction(1)
    frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format="yuvj444p")
    data = b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])
    assert np.abs(decode_picture(data, "here").astype(int) - picture).mean() < 4
