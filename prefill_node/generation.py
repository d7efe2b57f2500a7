"""The generation of each layer-buffer slot, in memory which decode can read."""

from __future__ import annotations

import secrets

import torch


class GenerationWords:
    """One 64-bit word per slot, in registered device memory.

    A reader copies a slot's data and then reads its word; when the word is not the one announced with the data, the
    copy may hold newer bytes and is thrown away. So a word must change before the first byte of its slot does whenever
    a reader may still be copying (ReuseGate sees to that). Words start at a random value, so that a reader of another
    life of this memory does not find the number it expects by chance.

    Not thread safe; ReuseGate calls ``bump`` under its own lock, and that lock's release orders the word before the
    writes which follow.
    """

    def __init__(self, words: torch.Tensor) -> None:
        """``words``: int64 [slots], contiguous, in device memory registered with the transfer engine."""
        if words.dtype != torch.int64 or words.dim() != 1 or not words.is_contiguous():
            raise ValueError(f"generation words must be int64 [slots], not {words.dtype} {list(words.shape)}")
        self._device = words
        self._values = [secrets.randbits(48) + 1 for _ in range(len(words))]
        words.copy_(torch.tensor(self._values, dtype=torch.int64))

    @property
    def address(self) -> int:
        """Of slot 0's word; slot s is at ``address + 8 * s``."""
        return self._device.data_ptr()

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, slot: int) -> int:
        return self._values[slot]

    def bump(self, slot: int) -> int:
        """Changes the word in device memory and returns the new value."""
        self._values[slot] += 1
        self._device[slot] = self._values[slot]
        return self._values[slot]
