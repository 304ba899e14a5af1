"""Quantities as people write them: `80 GiB`, `25 GB/s`, `200 Gbit/s`, `5 us`; SI numbers inside.

A bare number is refused: whether 25 means gigabytes or gigabits is a factor of eight in every plan.
"""

import math
import re

_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BITS = {
    prefix + bit: factor / 8
    for prefix, factor in (("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
    for bit in ("bit", "b")
}
_BANDWIDTHS = (
    {f"{unit}/s": float(factor) for unit, factor in _BYTES.items()}
    | {f"{unit}/s": factor for unit, factor in _BITS.items()}
    | {f"{prefix}bps": _BITS[f"{prefix}bit"] for prefix in "kKMGT"}
)
_PER_SECOND = {"ns": 10**9, "us": 10**6, "µs": 10**6, "ms": 10**3, "s": 1}
_QUANTITY = re.compile(r"\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9][^\s]*)\s*")


def parse_size(text: object) -> int:
    """Bytes of a size such as ``80 GiB``.

    Raises:
        ValueError: It has no known unit or is not positive; the message does not repeat the text.
    """
    number, unit = _parse(text, _BYTES, "a size with its unit, such as 80 GiB or 512 MB")
    if number * unit < 1:
        raise ValueError("expected a size of at least one byte")
    return round(number * unit)


def parse_bandwidth(text: object) -> float:
    """Bytes per second of a bandwidth such as ``25 GB/s`` (bytes) or ``200 Gbit/s`` (bits).

    Raises:
        ValueError: It has no known unit or is not positive; the message does not repeat the text.
    """
    form = "a bandwidth with its unit, such as 25 GB/s (bytes) or 200 Gbit/s (bits)"
    number, unit = _parse(text, _BANDWIDTHS, form)
    if not number:
        raise ValueError("expected a bandwidth above zero")
    return number * unit


def parse_time(text: object) -> float:
    """Seconds of a time such as ``5 us``.

    Raises:
        ValueError: It has no known unit or is negative; the message does not repeat the text.
    """
    number, per_second = _parse(text, _PER_SECOND, "a time with its unit, such as 5 us or 2 ms")
    return number / per_second


def format_bytes(size: float) -> str:
    """Three digits and a binary unit: ``1.50 GiB``."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{_three_digits(size / factor)} {unit}"
    return f"{size:.0f} B"


def format_bandwidth(bytes_per_second: float) -> str:
    """Three digits and a decimal unit: ``25.0 GB/s``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_second >= factor:
            return f"{_three_digits(bytes_per_second / factor)} {unit}/s"
    return f"{bytes_per_second:.0f} B/s"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: ``12.3 ms``."""
    if not seconds:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns"


def _parse(text: object, units: dict[str, int] | dict[str, float], form: str) -> tuple[float, float]:
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"expected {form}")
    try:
        number = float(match[1])
    except ValueError:
        raise ValueError(f"expected {form}") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"expected {form}, finite and not negative")
    return number, units[match[2]]


def _three_digits(number: float) -> str:
    whole = len(str(int(abs(number))))
    return f"{number:.{max(0, 3 - whole)}f}"
