"""How tests are spread over processes (`pytest -n`): files stay together, and all that starts Ray is one process's."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest-xdist has it ignored, by child processes too


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = "ray" if item.get_closest_marker("ray") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
