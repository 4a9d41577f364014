"""Numbers as people read them."""

from __future__ import annotations

import pytest

from rankzero.scalars import rounded, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.7472222195731268, "0.7472"),
        (3e-05, "3e-05"),
        (12.0, "12"),
        (12345.678, "12,346"),
        (-3.4e38, "-3.4e+38"),
        (float("nan"), "nan"),
    ],
)
def test_a_number_has_four_digits(value: float, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("0.004242640687119286", "0.004243"),
        ("lr -0.0042426406, 7e-05", "lr -0.004243, 7e-05"),
        ("1.2345678e-07", "1.235e-07"),
        ("[0.1234567, 1234.56789]", "[0.1235, 1235]"),
        ("7.2.2.20261111", "7.2.2.20261111"),
        ("lr-0.0042426406", "lr-0.0042426406"),
        ("v1.234567", "v1.234567"),
    ],
)
def test_long_numbers_of_a_text_are_rounded(text: str, short: str) -> None:
    assert rounded(text) == short
