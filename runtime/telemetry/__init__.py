"""Telemetry: records of a run while it goes on, and their receivers; ``docs/telemetry.md`` describes it for users.

Ranks pass :mod:`records <adaptra.runtime.telemetry.records>` to a :mod:`recorder <adaptra.runtime.telemetry.recorder>`. It
passes them to its sinks on a thread of its own: the log, files, Prometheus, TensorBoard, OpenTelemetry, and functions of the
user.
"""
