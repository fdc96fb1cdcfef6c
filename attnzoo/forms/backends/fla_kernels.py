"""Packages whose kernels flash-linear-attention takes in place of its own Triton ones, where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

# Each with the environment variable that switches it off with "0" and on with "1".
SWITCHES = {"tilelang": "FLA_TILELANG", "flash_qla": "FLA_FLASH_QLA", "flash_kda": "FLA_FLASH_KDA"}


def installed() -> list[str]:
    """The backends named in ``SWITCHES`` that can be imported."""
    return [name for name in SWITCHES if importlib.util.find_spec(name) is not None]


def in_use() -> list[str]:
    """Those that are not switched off."""
    return [name for name in installed() if os.environ.get(SWITCHES[name]) != "0"]


def asked_for(name: str) -> bool:
    """Whether the owner has switched on the kernels of an installed package of ``SWITCHES``."""
    return os.environ.get(SWITCHES[name], "0") != "0" and importlib.util.find_spec(name) is not None


def described(version: str) -> str:
    """A version of flash-linear-attention with the packages whose kernels it may take, and how to do without them."""
    used = in_use()
    found = [f"{name} ({SWITCHES[name]}=0{' switches it off' if name in used else ': off'})" for name in installed()]
    return f"{version} with {', '.join(found)}" if version and found else version


def taken() -> str:
    """The packages whose kernels flash-linear-attention's calls took since this was asked last; "" for Triton's own."""
    backends = sys.modules.get("fla.backends")
    found: set[str] = set()
    for name in ("_operation_registries", "_function_registries"):
        for registry in getattr(backends, name, {}).values():  # a registry logs its first call of each kind
            found |= {noted.rpartition(":")[2] for noted in registry._logged if not noted.endswith(":fail")}
            registry._logged.clear()
    return ", ".join(sorted(found))


def require_tilelang() -> dict[str, str]:
    """The environment in which flash-linear-attention takes TileLang's kernels.

    Raises:
        ImportError: TileLang, or a release of flash-linear-attention that knows it, is not installed.
        RuntimeError: flash-linear-attention finds no compiler for it.
    """
    importlib.import_module("tilelang")
    if not importlib.import_module("fla.backends").TileLangBackend.is_available():
        raise RuntimeError("flash-linear-attention finds no nvcc for it")
    return {SWITCHES["tilelang"]: "1"}
