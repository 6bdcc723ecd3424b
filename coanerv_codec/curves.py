"""Line charts as SVG, without a plotting library: training curves for `coanerv train --plot`."""

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path

from coanerv_codec.atomic import write_whole
from coanerv_codec.errors import InputError
from coanerv_codec.run_log import read_log

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 260, 60, 30, 20, 40
COLORS = ("#1b6ca8", "#c1440e", "#2e7d32", "#7b1fa2", "#ef6c00", "#455a64")


@dataclass(frozen=True)
class Chart:
    """One chart: named lines of (x, y) points."""

    title: str
    x_label: str
    lines: dict[str, list[tuple[float, float]]]


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers that cover [low, high]."""
    raw = (high - low or 1.0) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]


def _draw(chart: Chart, top: int) -> list[str]:
    points = [p for line in chart.lines.values() for p in line]
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = min(p[1] for p in points), max(p[1] for p in points)
    y0, y1 = (y0 - 0.5, y1 + 0.5) if y0 == y1 else (y0, y1)
    x1 = x1 if x1 > x0 else x0 + 1

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, top + TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    out = [f'<text x="{LEFT}" y="{top + 18}" font-weight="bold">{escape(chart.title)}</text>']
    out.append(f'<text x="{WIDTH - RIGHT}" y="{top + HEIGHT - 6}" text-anchor="end">{escape(chart.x_label)}</text>')
    for y in _ticks(y0, y1):
        across, down = place(x0, y)
        out.append(f'<path d="M{across:.1f} {down:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(f'<text x="{across - 6:.1f}" y="{down + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in _ticks(x0, x1):
        across, down = place(x, y0)
        out.append(f'<text x="{across:.1f}" y="{down + 16:.1f}" text-anchor="middle">{x:g}</text>')
    for number, (name, line) in enumerate(chart.lines.items()):
        color = COLORS[number % len(COLORS)]
        path = "L".join("{:.1f} {:.1f}".format(*place(*p)) for p in sorted(line))
        out.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        out.append(
            f'<text x="{WIDTH - RIGHT}" y="{top + 18 + 14 * number}" text-anchor="end" fill="{color}">{escape(name)}</text>'
        )
    return out


def svg(charts: list[Chart]) -> str:
    """Draw charts below one another."""
    height = HEIGHT * len(charts)
    body = [part for number, chart in enumerate(charts) for part in _draw(chart, number * HEIGHT)]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *body, "</svg>"])


def plot_run(log: Path, out: Path) -> None:
    """Draw a training run's quality, rate and speed over its steps."""
    if not log.exists() or not (records := read_log(log)):
        raise InputError(f"{log} holds no step of a run")
    titles = {
        "PSNR, dB": ("psnr", "valid_psnr"),
        "validation size, kB per clip": ("valid_kb",),
        "rate, bits per pixel": ("bits_per_pixel",),
        "cells per second": ("cells_per_second",),
    }
    charts = []
    for title, names in titles.items():
        lines = {n: [(r["step"], r[n]) for r in records if n in r] for n in names}
        lines = {n: line for n, line in lines.items() if line}
        if lines:
            charts.append(Chart(title, "step", lines))
    write_whole(out, svg(charts))
