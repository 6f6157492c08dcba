"""Which OpenGL MuJoCo renders with on a machine without a display.

MuJoCo itself chooses from the environment variable MUJOCO_GL when it is imported, and takes a windowing library if
that is unset. EGL uses a GPU where there is one and Mesa's software otherwise; OSMesa is always software. Set
MUJOCO_GL to overrule.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from types import ModuleType
from typing import Any

from lightning_embodied.errors import MissingExtraError, import_extra

_MEND = "apt-get install libegl1 libegl-mesa0 (or libosmesa6), or take pictures away with cameras=()"


def opengl_backend() -> str | None:
    """The backend that can render offscreen here: what MUJOCO_GL says, else `egl`, else `osmesa`, else None."""
    chosen = os.environ.get("MUJOCO_GL", "").strip().lower()
    if chosen:
        return chosen
    if sys.platform != "linux":
        return "cgl" if sys.platform == "darwin" else "wgl"
    if _count_egl_devices() > 0:
        return "egl"
    return "osmesa" if _loads("libOSMesa.so.8") or _loads("libOSMesa.so") else None


def import_mujoco() -> ModuleType:
    """Imports `mujoco` so that it looks for no display.

    Raises:
        MissingExtraError: MuJoCo is not installed, or MUJOCO_GL names a backend whose libraries are missing.
    """
    # Without OpenGL the simulation still runs; only pictures are refused.
    os.environ["MUJOCO_GL"] = opengl_backend() or "disable"
    return import_extra("mujoco", "sim")


def require_opengl() -> str:
    """The backend to render with.

    Raises:
        MissingExtraError: No usable OpenGL; names the Debian packages.
    """
    backend = opengl_backend()
    if backend is None or backend in ("disable", "disabled", "off", "false", "0"):
        raise missing_opengl("neither an EGL device (libEGL.so.1) nor libOSMesa.so.8")
    return backend


def opengl_context(size: int) -> Any:  # noqa: ANN401  one of MuJoCo's context classes, which share no base
    """Makes an offscreen OpenGL context and makes it current.

    Args:
        size: Width and height of the largest picture in pixels.

    Raises:
        MissingExtraError: This machine cannot render offscreen.
    """
    backend = require_opengl()
    module = f"mujoco.{backend}" if backend in ("egl", "osmesa", "glfw", "cgl") else "mujoco.glfw"
    try:
        context = importlib.import_module(module).GLContext(size, size)
        context.make_current()
    except Exception as error:  # PyOpenGL and MuJoCo raise what they like here
        raise missing_opengl(f"{backend}: {type(error).__name__}: {error}") from error
    return context


def missing_opengl(found: object) -> MissingExtraError:
    """The error for a machine that cannot render."""
    return MissingExtraError(
        "rendering camera pictures needs an offscreen OpenGL, and this machine has none",
        where="MUJOCO_GL",
        found=found,
        expected="Mesa's EGL or OSMesa, or a GPU driver with EGL",
        mend=_MEND,
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _count_egl_devices() -> int:
    """How many devices EGL can render on; zero when EGL or its vendor library (Mesa, NVIDIA) is missing."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
        egl.eglGetProcAddress.restype = ctypes.c_void_p
        address = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    except (OSError, AttributeError):
        return 0
    if not address:
        return 0
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(address)
    count = ctypes.c_int(0)
    return count.value if query(0, None, ctypes.byref(count)) else 0
