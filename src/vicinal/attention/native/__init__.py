"""Attention in C++ for CPUs: compiled once on the user's machine, and loaded into torch."""

from vicinal.attention.native.library import (
    NativeState,
    NativeStatus,
    attention_path,
    native_ready,
    native_status,
    prepare_native,
    prepare_native_for,
)

__all__ = [
    "NativeState",
    "NativeStatus",
    "attention_path",
    "native_ready",
    "native_status",
    "prepare_native",
    "prepare_native_for",
]
