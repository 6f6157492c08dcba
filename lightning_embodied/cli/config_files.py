"""Where a `--config` file is looked for: the path as given, else the configurations shipped in the package.

So `--config configs/quickstart.yaml` means the same in a checkout and after `pip install`.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from lightning_embodied.cli.suggestions import closest
from lightning_embodied.errors import ConfigError


def shipped_configs() -> dict[str, Path]:
    """The shipped configurations by file name."""
    folder = resources.files("lightning_embodied.configs")
    return {entry.name: Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(".yaml")}


def resolve_config(path: str) -> str:
    """The file a `--config` value stands for.

    Args:
        path: A path, or the name of a shipped configuration with or without `configs/` before it.

    Raises:
        ConfigError: There is no such file, and no shipped configuration of that name.
    """
    if "://" in path or Path(path).is_file() or "\n" in path or path.lstrip().startswith("{"):
        return path
    wanted = Path(path)
    shipped = shipped_configs()
    name = wanted.name if wanted.suffix else f"{wanted.name}.yaml"
    if name in shipped and wanted.parent.as_posix() in (".", "configs"):
        print(f"{path} is not here: using the one shipped at {shipped[name]}", file=sys.stderr)
        return str(shipped[name])
    beside = [str(near) for near in wanted.parent.glob("*.yaml")] if wanted.parent.is_dir() else []
    near = closest(path, [*beside, *(f"configs/{known}" for known in shipped)])
    raise ConfigError(
        "the configuration file does not exist",
        where="--config",
        found=path,
        expected="a YAML file, or one of the shipped " + ", ".join(sorted(shipped)),
        mend=f"did you mean {near!r}?" if near else None,
    )


def resolve_configs(args: list[str]) -> list[str]:
    """Replaces every `--config` value in a command line by the file it stands for."""
    resolved = list(args)
    for i, arg in enumerate(args):
        flag, equals, value = arg.partition("=")
        if flag not in ("--config", "-c"):
            continue
        if equals:
            resolved[i] = f"{flag}={resolve_config(value)}"
        elif i + 1 < len(args):
            resolved[i + 1] = resolve_config(args[i + 1])
    return resolved
