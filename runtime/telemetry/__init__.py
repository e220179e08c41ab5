"""Telemetry: what a run tells of itself while it runs, and who is told; ``docs/telemetry.md`` shows it from outside.

Ranks tell :mod:`records <adaptra.runtime.telemetry.records>` to a :mod:`recorder <adaptra.runtime.telemetry.recorder>`, which
hands them to its sinks on a thread of its own: the log, files, Prometheus, TensorBoard, and functions of the user's.
"""
