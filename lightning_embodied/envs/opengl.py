"""Which OpenGL MuJoCo renders with on a machine without a display, decided before `mujoco` is imported.

MuJoCo reads the environment variable MUJOCO_GL once, at import; a wrong choice cannot be undone in the same process.
EGL uses a GPU where there is one and Mesa's software otherwise; OSMesa is always software. Set MUJOCO_GL to overrule.
"""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType

from lightning_embodied.errors import EmbodiedError, MissingExtraError, import_extra

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
    """Imports `mujoco` with an OpenGL that works offscreen, when there is one.

    Raises:
        MissingExtraError: MuJoCo is not installed.
        EmbodiedError: MUJOCO_GL names a backend whose libraries are missing.
    """
    backend = opengl_backend()
    chosen_by_user = bool(os.environ.get("MUJOCO_GL"))
    # Without OpenGL the simulation still runs; only pictures are refused, by `require_opengl`.
    os.environ["MUJOCO_GL"] = backend or "disable"
    try:
        return import_extra("mujoco", "sim")
    except MissingExtraError as error:
        if chosen_by_user and "mujoco" in str(error.found) and "No module" not in str(error.found):
            raise EmbodiedError(
                "MuJoCo cannot load the OpenGL that MUJOCO_GL asks for",
                where="MUJOCO_GL",
                found=f"{backend}: {error.found}",
                mend=f"unset MUJOCO_GL, or {_MEND}",
            ) from error
        raise


def require_opengl() -> None:
    """Checks that pictures can be rendered.

    Raises:
        MissingExtraError: No usable OpenGL; names the Debian packages.
    """
    if os.environ.get("MUJOCO_GL", "").lower() in ("", "disable", "disabled", "off", "false", "0"):
        raise missing_opengl("neither an EGL device (libEGL.so.1) nor libOSMesa.so.8")


def missing_opengl(found: object) -> MissingExtraError:
    """The error for a machine that cannot render."""
    return MissingExtraError(
        "rendering camera pictures needs an offscreen OpenGL, and this machine has none",
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
