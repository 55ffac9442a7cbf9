"""Sizes as people write them."""

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)([bB]?)")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def human_int(text: str) -> int:
    """`4096`, `8k` (8,000), `8K` (8,192), `1M`, `4GiB`, `2GB`: lower case and `B` alone are decimal, upper case binary.

    Raises:
        ValueError: not a size, or not a whole number.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return int(text)
    number, unit, binary, suffix = match.groups()
    base = 1024 if binary or (unit.isupper() and not suffix) else 1000
    value = float(number) * base ** _POWERS[unit.lower()]
    if value != int(value):
        raise ValueError(f"{text} is no whole number")
    return int(value)


def human_size(size: int) -> str:
    """Bytes in decimal units, as file sizes are published: `512 B`, `1.2 MB`, `4.7 GB`."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "B" else f"{value:.1f} {units[0]}"
