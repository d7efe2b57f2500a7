"""Device memory over a driver that is not ours."""

from __future__ import annotations

import pytest
import torch

from engine.device import Device
from transfer.hostcann import runtime


def test_memory_of_a_real_driver_is_refused_by_a_clear_error(monkeypatch):
    """The processor would crash on its first touch of it."""
    monkeypatch.setattr(runtime, "emulated", lambda: False)
    with pytest.raises(runtime.DeviceError, match=r"device 3: libascendcl\.so is a real driver's"):
        Device(3).empty((2, 2), torch.float32)
