"""Charts as inline SVG: curves over training steps and intervals of success rates.

Drawn here in a page of code because a report must be one small file without scripts or outside resources. Colours
come from the page's style (classes `s0`, `s1`, …), so dark mode and print need nothing from this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

Points = Sequence[tuple[float, float]]
"""A curve: `(x, y)` in ascending `x`."""

_WIDTH, _HEIGHT = 420, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 18, 12, 30
_MAX_POINTS = 240


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) that span a range.

    Args:
        low: Lower end.
        high: Upper end, at least `low`.
        count: About how many steps.

    Returns:
        Ascending ticks; the first is at most `low` and the last at least `high`.
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * unit for unit in (1, 2, 5, 10) if power * unit >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def thin(points: Points, limit: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """Averages neighbours until at most `limit` points are left, so that a long run stays a small file."""
    size = math.ceil(len(points) / limit) if points else 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def line_chart(curves: Mapping[str, Points], *, title: str, percent: bool = False) -> Markup:
    """Draws curves over training steps.

    Args:
        curves: Legend to curve; at least one point altogether.
        title: What is drawn, with its unit; read out by screen readers.
        percent: Whether `y` is a share in [0, 1], shown in per cent.

    Returns:
        A `<figure>` with title, legend and drawing.
    """
    curves = {name: thin(points) for name, points in curves.items() if points}
    xs = [x for points in curves.values() for x, _ in points]
    ys = [y for points in curves.values() for _, y in points]
    x_ticks, y_ticks = nice_ticks(0.0, max(xs)), nice_ticks(min(0.0, *ys), max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        right, down = x / x_ticks[-1], 1 - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return _LEFT + right * (_WIDTH - _LEFT - _RIGHT), _TOP + down * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_y_tick(place(0, y)[1], _number(y, percent)) for y in y_ticks]
    parts += [_x_tick(place(x, 0)[0], _number(x)) for x in x_ticks]
    for i, points in enumerate(curves.values()):
        path = " ".join(f"{'L' if j else 'M'}{x:.1f} {y:.1f}" for j, (x, y) in enumerate(place(*p) for p in points))
        parts.append(f'<path class="line s{i}" d="{path}"/>')
        if len(points) == 1:
            x, y = place(*points[0])
            parts.append(f'<circle class="dot s{i}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
    drawing = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return Markup(  # noqa: S704  numbers are ours, names are escaped
        f"<figure><figcaption><b>{escape(title)}</b>{_legend(list(curves))}</figcaption>{drawing}</figure>"
    )


def interval_bar(low: float, rate: float, high: float, series: int) -> Markup:
    """Draws a rate with its interval on a scale from 0 to 1 that is as wide as its container.

    Args:
        low: Lower bound, in [0, 1].
        rate: The rate, in [0, 1].
        high: Upper bound, in [0, 1].
        series: Which colour of the page.
    """
    marks = "".join(
        f'<line class="grid" x1="{x}%" x2="{x}%" y1="3" y2="17"/>' for x in (2, 26, 50, 74, 98)
    )  # 2 % margins keep the dots at 0 and 1 whole

    def at(share: float) -> str:
        return f"{2 + 96 * share:.2f}%"

    return Markup(  # noqa: S704  numbers only
        f'<svg class="interval" height="20" role="img" aria-label="{rate:.0%}, between {low:.0%} and {high:.0%}">'
        f"{marks}"
        f'<line class="line s{series}" x1="{at(low)}" x2="{at(high)}" y1="10" y2="10"/>'
        f'<circle class="dot s{series}" cx="{at(rate)}" cy="10" r="5"/></svg>'
    )


def _y_tick(y: float, label: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _x_tick(x: float, label: str) -> str:
    return f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{label}</text>'


def _number(value: float, percent: bool = False) -> str:
    if percent:
        return f"{value * 100:.4g} %"
    if abs(value) >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    return "".join(f'<span class="key"><i class="s{i}"></i>{escape(name)}</span>' for i, name in enumerate(names))
