"""Launches PTX through the CUDA driver, which compiles it for the GPU that is there."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from typing import Any

from page4.experiments.sm70.ptx_entry import EntryPoint, as_old_ptx, entry_point

_LIBRARY = "libcuda.so.1"
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # CUjit_option
_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
_LOG_BYTES = 16384
_SIGNATURES: dict[str, list[Any]] = {
    "cuGetErrorString": [c_int, ctypes.POINTER(c_char_p)],
    "cuModuleLoadDataEx": [
        ctypes.POINTER(c_void_p), c_char_p, c_uint, ctypes.POINTER(c_int), ctypes.POINTER(c_void_p),
    ],
    "cuModuleGetFunction": [ctypes.POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernel": [
        c_void_p, *[c_uint] * 7, c_void_p, ctypes.POINTER(c_void_p), ctypes.POINTER(c_void_p),
    ],
}  # fmt: skip


class DriverError(Exception):
    """What the driver refused, and why."""


class Driver:
    """The CUDA driver's interface, in the context that is current in the calling thread.

    PyTorch makes its context current with the first tensor on a GPU. Kernels stay loaded until the process
    ends.
    """

    def __init__(self, library: Any = None) -> None:
        """``library``: loaded already; the installed driver if None.

        Raises:
            OSError: no driver is installed.
        """
        self._cuda = ctypes.CDLL(_LIBRARY) if library is None else library
        for name, types in _SIGNATURES.items():
            function = getattr(self._cuda, name)
            function.argtypes, function.restype = types, c_int
        self._loaded: dict[str, tuple[EntryPoint, c_void_p]] = {}

    def launch(
        self, ptx: str, values: list[Any], grid: tuple[int, ...], shared_bytes: int, stream: int
    ) -> None:
        """Compile PTX for the GPU, once, and launch its kernel; returns before it ends.

        Args:
            ptx: a text with one kernel, from Triton.
            values: of its run-time arguments, in order: tensors, ints and floats.
            grid: programs along one to three axes.
            shared_bytes: that a program asks for at the launch.
            stream: its handle.

        Raises:
            DriverError: the driver refuses the PTX or the launch.
            ValueError: values that do not fit the kernel's parameters.
        """
        if ptx not in self._loaded:
            self._loaded[ptx] = self._load(ptx, shared_bytes)
        entry, function = self._loaded[ptx]
        packed = entry.packed(values)
        addresses = (c_void_p * len(packed))(*(ctypes.addressof(value) for value in packed))
        x, y, z = (*grid, 1, 1)[:3]
        if x * y * z:
            self._check(
                self._cuda.cuLaunchKernel(
                    function, x, y, z, entry.threads, 1, 1, shared_bytes, stream, addresses, None
                ),
                f"launch {entry.name}",
            )

    def _load(self, ptx: str, shared_bytes: int) -> tuple[EntryPoint, c_void_p]:
        entry = entry_point(ptx)
        module, function = c_void_p(), c_void_p()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
        settings = (c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        text = as_old_ptx(ptx).encode()
        status = self._cuda.cuModuleLoadDataEx(byref(module), text, 2, options, settings)
        self._check(status, f"compile {entry.name}", log.value)
        status = self._cuda.cuModuleGetFunction(byref(function), module, entry.name.encode())
        self._check(status, f"find {entry.name}")
        # More than 48 KiB must be asked for before.
        status = self._cuda.cuFuncSetAttribute(function, _DYNAMIC_SHARED_BYTES, shared_bytes)
        self._check(status, f"give {entry.name} {shared_bytes} bytes of shared memory")
        return entry, function

    def _check(self, status: int, what: str, log: bytes = b"") -> None:
        if status:
            text = c_char_p()
            self._cuda.cuGetErrorString(status, byref(text))
            reason = (text.value or b"unknown error").decode()
            raise DriverError(f"cannot {what}: {reason} ({status}) {log.decode(errors='replace')}".rstrip())
