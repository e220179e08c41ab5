"""Metrics for Prometheus: the present values, as text over HTTP on request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from adaptra.errors import MissingExtraError, OptionError
from adaptra.runtime.telemetry.metrics import METRICS, MetricValues
from adaptra.runtime.telemetry.records import TimestampedRecord

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family


class PrometheusSink:
    """Serves the metrics of this process's ranks until it is closed.

    Args:
        address: The address of this host to listen on.
        port: The port to listen on; no other program may use it.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        OptionError: The system refuses the address or the port; includes its text.
    """

    follows_steps = True

    def __init__(self, address: str, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise MissingExtraError("metrics need prometheus_client: pip install 'adaptra[metrics]'") from error
        self._board = MetricValues()
        # A registry of its own, so that metrics don't mix with those of other pipelines in this process or of the user.
        self.registry: CollectorRegistry = CollectorRegistry()
        self.registry.register(self)
        self._where = f"{address}:{port}"
        try:
            self._server, self._thread = start_http_server(port, address, self.registry)
        except OSError as error:
            raise OptionError(
                f"Telemetry: metrics on {self._where}: {error.strerror}: expected a free port of this host; each rank of the "
                "job listens on metrics_port + its rank"
            ) from error

    def collect(self) -> Iterator[Family]:
        """Yield the present values, as the registry requests them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values = self._board.values()
        for metric in METRICS:
            family_of = CounterMetricFamily if metric.is_total else GaugeMetricFamily
            family = family_of(f"adaptra_{metric.name}", metric.help, labels=metric.labels)
            for sample in values:
                if sample.metric is metric:
                    family.add_metric(sample.labels, sample.value)
            yield family

    def take(self, timestamped: TimestampedRecord) -> None:
        """See :meth:`.recorder.Sink.take`."""
        self._board.update(timestamped.record)

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __str__(self) -> str:
        return f"the metrics on {self._where}"
