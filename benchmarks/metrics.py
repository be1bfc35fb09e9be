"""Read the metrics of a process."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


class Metrics:
    """All samples of a metrics port at one moment.

    Args:
        port: The process' metrics port.
        host: Its address.

    Raises:
        OSError: No process answers there.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as page:
            text = page.read().decode()
        self._families = list(text_string_to_metric_families(text))

    def value(self, name: str, **labels: str) -> float:
        """Return a sample's value, summed over other labels; 0 without matching samples.

        Raises:
            KeyError: There is no such metric.
        """
        families = [family for family in self._families if name.startswith(family.name)]
        if not families:
            raise KeyError(name)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
