"""`lightning-embodied report`: one HTML file that shows what a run trained on, how it went and what it can do."""

from __future__ import annotations

from lightning_embodied.evaluation import build_report


def report(run_dir: str, *, output: str | None = None) -> None:
    """Writes a run's report: data, configuration, curves, success table and videos in one HTML file.

    Args:
        run_dir: The run directory that `fit` wrote.
        output: File to write; default: `report.html` in the run directory.
    """
    print(f"report: {build_report(run_dir, output)}")
