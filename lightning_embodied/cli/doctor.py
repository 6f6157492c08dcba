"""`lightning-embodied doctor`: what this machine has, what is missing, and the one command that brings it.

Every line is tried, not assumed: codecs are opened, and a picture is rendered in a subprocess (a broken GL driver
kills its process). Needs neither torch nor Lightning to be importable: that is what it is asked about.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lightning_embodied.cli.rendering import RENDER_BACKENDS, try_rendering

if TYPE_CHECKING:
    from rich.table import Table

_EXTRAS = {
    "wandb": "wandb",
    "gymnasium": "sim",
    "metaworld": "sim",
    "mujoco": "sim",
    "ray": "ray",
    "webdataset": "webdataset",
    "transformers": "models",
    "torchao": "fp8",
}
_CORE = ("torch", "lightning", "jsonargparse", "numpy", "pyarrow", "safetensors", "tokenizers", "av", "rich", "jinja2")


@dataclass(frozen=True)
class Finding:
    """One line of the answer.

    Args:
        section: What it belongs to.
        name: What was looked at.
        status: `ok`; `missing`, optional and absent; `broken`, needed and absent or not working.
        value: What was found.
        mend: The command that brings it.
    """

    section: str
    name: str
    status: Literal["ok", "missing", "broken"]
    value: str
    mend: str | None = None


def doctor(*, json: bool = False) -> int:
    """Shows what this machine has, what is missing, and how to get it.

    Args:
        json: Print one JSON list instead of the table.

    Returns:
        1 when something the core needs is broken, else 0.
    """
    findings = examine()
    if json:
        print(dumps([asdict(finding) for finding in findings], indent=2))
    else:
        from rich.console import Console

        Console().print(_table(findings))
        if mends := _mends(findings):
            print("\n".join(["to get what is missing:", *mends]))
    return int(any(finding.status == "broken" for finding in findings))


def examine() -> list[Finding]:
    """Looks at everything."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("machine", _machine),
        ("packages", _packages),
        ("torch", _torch),
        ("attention", _attention),
        ("fp8", _fp8),
        ("video", _video),
        ("rendering", _rendering),
    ]
    findings: list[Finding] = []
    for section, check in checks:
        try:
            findings += check()
        except Exception as error:  # doctor's work is to report this, whatever it is
            findings.append(Finding(section, section, "broken", f"{type(error).__name__}: {error}"))
    return findings


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "system", "ok", f"{platform.platform()}, Python {platform.python_version()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        memory = f", {gigabytes:.1f} GiB of memory"
    yield Finding("machine", "cores", "ok", f"{cores} usable{memory}")
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    full = free < 2
    yield Finding(
        "machine", "disk", "broken" if full else "ok", f"{free:.1f} GiB free here", "free some space" if full else None
    )


def _packages() -> Iterator[Finding]:
    for name in _CORE:
        found = _version(name)
        mend = None if found else "pip install lightning-embodied"
        yield Finding("packages", name, "ok" if found else "broken", found or "not installed", mend)
    for name, extra in _EXTRAS.items():
        found = _version(name)
        mend = None if found else f"pip install 'lightning-embodied[{extra}]'"
        yield Finding("packages", name, "ok" if found else "missing", found or "not installed", mend)


def _torch() -> Iterator[Finding]:
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPU"
    yield Finding("torch", "build", "ok", f"{torch.__version__}, {built}, {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        mend = None if torch.version.cuda else "install torch's CUDA build where there is an NVIDIA GPU"
        yield Finding("torch", "GPU", "missing", "none usable", mend)
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        memory = gpu.total_memory / 2**30
        value = f"{gpu.name}, {memory:.0f} GiB, compute capability {gpu.major}.{gpu.minor}"
        yield Finding("torch", f"GPU {i}", "ok", value)


def _attention() -> Iterator[Finding]:
    import torch

    from lightning_embodied.attention import attention_backends

    device = "cuda" if torch.cuda.is_available() else "cpu"
    usable = [backend.name for backend in attention_backends() if backend.available and backend.device in ("", device)]
    for backend in attention_backends():
        note = ", used here" if backend.name == usable[0] else ""
        lacks_flash = backend.name == "flash-attn-2" and device == "cuda" and not backend.available
        mend = "pip install 'lightning-embodied[cuda]'" if lacks_flash else None
        yield Finding("attention", backend.name, "ok" if backend.available else "missing", backend.reason + note, mend)


def _fp8() -> Iterator[Finding]:
    import torch

    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    if not capable:
        yield Finding("fp8", "hardware", "missing", "none: FP8 needs a GPU of compute capability 8.9 or more")
        return
    yield Finding("fp8", "hardware", "ok", "this GPU multiplies FP8")
    for package, extra in (("torchao", "fp8"), ("transformer-engine", "cuda")):
        found = _version(package)
        mend = None if found else f"pip install 'lightning-embodied[{extra}]'"
        yield Finding("fp8", package, "ok" if found else "missing", found or "not installed", mend)


def _video() -> Iterator[Finding]:
    import av

    for codec, encoders in {"h264": ("libx264", "libopenh264"), "av1": ("libsvtav1", "libaom-av1")}.items():
        usable = [name for name in encoders if _has_codec(name, "w")]
        decodes = _has_codec(codec, "r") or _has_codec("libdav1d", "r")
        value = f"encodes with {usable[0] if usable else 'nothing'}, {'decodes' if decodes else 'does not decode'}"
        good = bool(usable) and decodes
        mend = None if good else "pip install --force-reinstall av (its wheels bring the codecs)"
        yield Finding("video", f"{codec} (PyAV {av.__version__})", "ok" if good else "broken", value, mend)
    found = _version("torchcodec")
    yield Finding(
        "video",
        "torchcodec",
        "ok" if found else "missing",
        found or "not installed; PyAV decodes instead",
        None if found else "pip install torchcodec (the release for your torch, and FFmpeg's libraries)",
    )


def _has_codec(name: str, mode: Literal["r", "w"]) -> bool:
    import av

    try:
        av.codec.Codec(name, mode)
    except ValueError:
        return False
    return True


def _rendering() -> Iterator[Finding]:
    if _version("mujoco") is None:
        yield Finding("rendering", "MuJoCo", "missing", "not installed", "pip install 'lightning-embodied[sim]'")
        return
    outcomes = {backend: try_rendering(backend) for backend in RENDER_BACKENDS}
    works = any(outcome.works for outcome in outcomes.values())
    for backend, outcome in outcomes.items():
        mend = None if works else RENDER_BACKENDS[backend]
        chosen = os.environ.get("MUJOCO_GL")
        note = ", chosen by MUJOCO_GL" if chosen == backend else ""
        yield Finding("rendering", backend, "ok" if outcome.works else "missing", outcome.value + note, mend)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _table(findings: list[Finding]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False, title="lightning-embodied doctor", title_justify="left")
    signs = {"ok": ("ok", "green"), "missing": ("--", "yellow"), "broken": ("!!", "bold red")}
    for i, finding in enumerate(findings):
        if i and findings[i - 1].section != finding.section:
            table.add_section()
        what = finding.name if finding.section in ("machine", "packages") else f"{finding.section}: {finding.name}"
        table.add_row(Text(*signs[finding.status]), Text(what), Text(finding.value))
    return table


def _mends(findings: list[Finding]) -> list[str]:
    """One line per command, with what it brings: a table would break the commands where they cannot be copied."""
    brings: dict[str, list[str]] = {}
    for finding in findings:
        if finding.mend is not None:
            brings.setdefault(finding.mend, []).append(finding.name)
    return [f"  {', '.join(names)}: {mend}" for mend, names in brings.items()]
