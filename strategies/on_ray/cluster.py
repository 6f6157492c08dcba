"""Finding or starting a Ray cluster, and bringing the project's code to it.

A cluster of our own inherits this process's environment. One that was there before knows nothing of the project: the
packages that this process imported from outside its environment are uploaded with the job.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import site
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_embodied.errors import ConfigError, import_extra

if TYPE_CHECKING:
    from lightning_embodied.strategies.on_ray.options import RayOptions

_JOB_ENVIRONMENT = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit`, which brings the code itself
_IGNORED = shutil.ignore_patterns("__pycache__", ".git", ".venv", "*.pyc", "node_modules")


def connect(address: str | None, runtime_env: dict[str, Any] | None, cpus: float) -> Any:
    """Connects this process to Ray, once.

    Args:
        address: Of an existing cluster; `local` for a new one on this machine; None for the one that RAY_ADDRESS or
            `ray start` on this machine gives, and a new one when there is none.
        runtime_env: Ray's description of the environment of all workers.
        cpus: Logical CPUs that the workers ask for; a new cluster has at least these.

    Returns:
        The `ray` module.

    Raises:
        ConfigError: There is no cluster at the address.
    """
    ray = import_extra("ray", "ray")
    if ray.is_initialized():
        return ray
    options = {"log_to_driver": False, "logging_level": logging.WARNING}
    if address != "local" and (address or "RAY_ADDRESS" in os.environ or cluster_here()):
        with contextlib.ExitStack() as stack:
            job_env = runtime_env or {}
            if _JOB_ENVIRONMENT not in os.environ and "working_dir" not in job_env and "py_modules" not in job_env:
                job_env = {**job_env, "working_dir": stack.enter_context(staged_project())}
            try:
                ray.init(address=address or "auto", runtime_env=job_env, **options)
            except (ConnectionError, RuntimeError) as error:
                if address is not None or "RAY_ADDRESS" in os.environ:
                    raise ConfigError(
                        "no Ray cluster answers",
                        where="address",
                        found=f"{address or os.environ['RAY_ADDRESS']}: {error}",
                        mend="start one with `ray start --head`, or leave address out to use this machine",
                    ) from error
                if not isinstance(error, ConnectionError):
                    raise
            else:
                return ray
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 lets anything else on the machine go first
    ray.init(address="local", num_cpus=max(os.cpu_count() or 1, math.ceil(cpus)), runtime_env=runtime_env, **options)
    return ray


@contextlib.contextmanager
def staged_project() -> Iterator[str]:
    """A temporary directory with the packages and modules that this process imported from its own project."""
    with tempfile.TemporaryDirectory(prefix="project-") as directory:
        for name, module in project_modules().items():
            _copy(name, module, Path(directory))
        yield directory


def project_modules() -> dict[str, ModuleType]:
    """Top-level modules in use that lie in no installed environment, by name."""
    found = {}
    for name, module in list(sys.modules.items()):
        if "." in name or name == "__main__":
            continue
        places = _places(module)
        if places and not any(_is_installed(place) for place in places):
            found[name] = module
    return found


def cluster_here() -> bool:
    """Whether the cluster that `ray start` on this machine noted answers; a note outlives its cluster."""
    note = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    if not note.is_file():
        return False
    host, _, port = note.read_text().strip().rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except (OSError, ValueError):
        return False
    return True


def rendezvous() -> tuple[str, int]:
    """Address of this node and a port that is free on it now."""
    ray = import_extra("ray", "ray")
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(ray.util.get_node_ip_address()), int(probe.getsockname()[1])


def no_room(ray: Any, options: RayOptions, why: str) -> ConfigError:
    """The error to raise when the workers could not be started.

    Args:
        ray: The `ray` module.
        options: Of the strategy.
        why: What the orchestration saw.
    """
    low, high = options.worker_range
    return ConfigError(
        "Ray could not start the workers",
        found=f"{ray.cluster_resources()} in the cluster; {why}",
        expected=f"{low if low == high else f'{low} to {high}'} workers with {options.resources} each",
        mend="add nodes, or lower num_workers or resources_per_worker of the strategy",
    )


def _copy(name: str, module: ModuleType, directory: Path) -> None:
    """Copies a package with the parts that its `__path__` reaches, or a single module."""
    if not hasattr(module, "__path__"):
        shutil.copy2(str(module.__file__), directory)
        return
    first, *others = [Path(place) for place in module.__path__]
    shutil.copytree(first, directory / name, ignore=_IGNORED, dirs_exist_ok=True)
    for other in others:  # subpackages that are in use and lie beside the package, as in a checkout of this project
        for part in {key.split(".")[1] for key in sys.modules if key.startswith(f"{name}.")}:
            if (other / part / "__init__.py").is_file():
                shutil.copytree(other / part, directory / name / part, ignore=_IGNORED, dirs_exist_ok=True)


def _places(module: ModuleType) -> list[Path]:
    if hasattr(module, "__path__"):
        return [Path(place).resolve() for place in module.__path__]
    file = getattr(module, "__file__", None)
    return [Path(file).resolve()] if file and file.endswith(".py") else []


def _is_installed(place: Path) -> bool:
    roots = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages(), sys.base_prefix}
    return any(place.is_relative_to(Path(root).resolve()) for root in roots if root)
