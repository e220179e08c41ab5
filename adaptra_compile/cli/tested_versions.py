"""The versions that adaptra was tested with: lowest and newest of each package. ``constraints/`` pins the same."""

from __future__ import annotations

from typing import Final

TESTED: Final = {
    "python": ("3.11", "3.13"),
    "torch": ("2.11", "2.13"),
    "accelerate": ("1.15.0", "1.15.0"),
    "sympy": ("1.13.3", "1.14.0"),
    "rich": ("13.0.0", "15.0.0"),
    "matplotlib": ("3.9.0", "3.11.2"),
    "opentelemetry_sdk": ("1.27.0", "1.45.2"),
    "ortools": ("9.12.4544", "9.15.6755"),
    "prometheus_client": ("0.20.0", "0.26.0"),
    "safetensors": ("0.8.0", "0.8.0"),
    "tensorboard": ("2.16.2", "2.21.0"),
    "transformers": ("5.23.0", "5.24.0"),
}


def outside(package: str, installed: str) -> str | None:
    """Return how an installed version lies outside of what was tested, or None.

    A tested ``2.13`` covers all of 2.13. What follows a version's numbers, such as ``+cpu``, does not count.
    """
    if package not in TESTED:
        return None
    lowest, newest = TESTED[package]
    numbers = _numbers(installed)
    if numbers < _numbers(lowest):
        return f"older than {lowest}, the oldest tested"
    last = _numbers(newest)
    if numbers[: len(last)] > last:
        return f"newer than {newest}, the newest tested"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
