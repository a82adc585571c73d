"""Numbers, axes and charts of the report."""

from __future__ import annotations

import math
import re

from sftkit.reports.collect import thin
from sftkit.reports.values import (
    Series,
    axis_texts,
    duration,
    el,
    figure,
    format_value,
    histogram,
    line_chart,
    log_ticks,
    ticks,
)


def test_long_curves_become_short_and_keep_every_extreme() -> None:
    points: list[list[float | None]] = [[float(i), math.sin(i / 900)] for i in range(50_000)]
    points[31_234][1], points[40_001][1], points[777][1] = 99.0, -99.0, None
    kept = thin(points)
    assert len(kept) <= 500
    assert [31_234.0, 99.0] in kept
    assert [40_001.0, -99.0] in kept
    assert [777.0, None] in kept
    assert kept == sorted(kept, key=lambda point: point[0] or 0.0)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]


def test_axes_have_round_and_different_labels() -> None:
    assert ticks(0.0, 97.0) == [0, 20, 40, 60, 80]
    assert axis_texts(ticks(0.0, 1e-5)) == ["0", "2e-6", "4e-6", "6e-6", "8e-6", "1e-5"]
    assert axis_texts(ticks(0, 42_000)) == ["0", "10k", "20k", "30k", "40k"]
    assert axis_texts(log_ticks(0.9, 1100)) == ["1", "10", "100", "1000"]
    for low, high in ((1.3712, 1.3741), (0.0, 3.0), (-2.0, 5.0), (1e5, 3.4e6), (0.12, 0.13)):
        texts = axis_texts(ticks(low, high))
        assert len(set(texts)) == len(texts) >= 3


def test_charts_of_one_value_or_of_equal_values_are_drawn() -> None:
    for points in ([(5, 2.0)], [(1, 0.0), (2, 0.0)], [(1, -3.0), (9, -3.0)], [(1, 1e99), (2, -1e99)]):
        drawing = line_chart([Series("value", points)], "value", zero=True)
        assert not re.search(r"nan|inf", drawing)
    assert figure("value", "", [Series("value", [(1, None)])]) is None


def test_few_points_are_seen_as_points_and_many_as_a_line() -> None:
    two, twenty, many = (
        str(line_chart([Series("loss", [(step, 1.0 / step) for step in range(1, n + 1)])], "loss")) for n in (2, 20, 21)
    )
    for few, points in ((two, 2), (twenty, 20)):
        assert few.count('r="4" class="dot"') == points
        assert few.count('class="faint"') == 1
    assert many.count('class="dot hidden"') == 21
    assert 'class="faint"' not in many


def test_every_bar_of_the_histogram_says_its_range_and_count() -> None:
    drawing = str(histogram([0, 32, 64, 128], [3, 0, 7], {"median": 70}, "tokens", "lengths of documents"))
    assert drawing.count("<rect") == 3
    assert "64 to 128 tokens: 7" in drawing
    assert histogram([0, 1], [3, 4], {}, "tokens", "lengths") is None


def test_of_two_runs_no_line_shares_its_class_with_another() -> None:
    points = [(step, float(step)) for step in range(1, 40)]
    lines = [Series(f"{run} {i}", points, i, other) for run, other in (("a", False), ("b", True)) for i in range(2)]
    drawing = str(line_chart(lines, "both"))
    classes = re.findall(r'<g class="([^"]+)"', drawing)
    assert sorted(classes) == ["other o0", "other o1", "s0 solid", "s1 solid"]
    assert 'class="s1"' in str(line_chart(lines[:2], "one"))


def test_numbers_read_well() -> None:
    assert [format_value(v) for v in (None, 0.000012345, 1.23456, 41153.7, 12, True)] == [
        "–",
        "1.234e-5",
        "1.235",
        "41,154",
        "12",
        "yes",
    ]
    assert [duration(v) for v in (4.25, 61, 7384, 3599.9)] == ["4.2 s", "1 min 01 s", "2 h 03 min", "1 h 00 min"]
    assert el("b", "<i>", title='"') == '<b title="&#34;">&lt;i&gt;</b>'
