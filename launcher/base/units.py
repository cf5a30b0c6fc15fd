"""Numbers with units as text."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
_COUNT_UNITS = ("", "K", "M", "B", "T")
_FLOP_UNITS = ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP")


def format_bytes(num_bytes: float) -> str:
    """Decimal byte units (1 GB = 1e9 bytes), three significant digits.

    >>> format_bytes(80e9), format_bytes(1536), format_bytes(12)
    ('80.0 GB', '1.54 KB', '12 B')
    """
    return _scaled(num_bytes, _BYTE_UNITS, " ")


def format_count(count: float) -> str:
    """A count in short scale.

    >>> format_count(8_030_261_248), format_count(124_439_808), format_count(12)
    ('8.03B', '124M', '12')
    """
    return _scaled(count, _COUNT_UNITS, "")


def format_flops(flops: float) -> str:
    """Floating-point operations with a decimal prefix.

    >>> format_flops(3.12e14), format_flops(3.86e19), format_flops(12)
    ('312 TFLOP', '38.6 EFLOP', '12 FLOP')
    """
    return _scaled(flops, _FLOP_UNITS, " ")


def format_duration(seconds: float) -> str:
    """A duration in a suitable unit.

    >>> format_duration(0.0123), format_duration(75), format_duration(8000)
    ('12.3 ms', '1 min 15 s', '2 h 13 min')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def format_percent(fraction: float) -> str:
    """A share with one decimal.

    >>> format_percent(0.125)
    '12.5 %'
    """
    return f"{100 * fraction:.1f} %"


def counted(number: int, noun: str) -> str:
    """A number and what is counted, in the singular or the plural.

    >>> counted(1, "rank"), counted(8, "rank"), counted(2, "microbatch")
    ('1 rank', '8 ranks', '2 microbatches')
    """
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


def _scaled(value: float, units: tuple[str, ...], gap: str) -> str:
    scaled, unit = float(value), units[0]
    for unit in units:
        if abs(scaled) < 999.5 or unit == units[-1]:
            break
        scaled /= 1000
    if unit == units[0] and scaled == int(scaled):
        return f"{int(scaled)}{gap}{unit}".rstrip()
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f}{gap}{unit}".rstrip()
