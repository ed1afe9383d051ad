"""Small results on their way from the device to the host."""

from __future__ import annotations

import torch


class Readback:
    """A tensor to be read on the host some time later.

    On CUDA its copy is submitted at once, so that reading it waits for the work submitted before it and for nothing
    that came after. On CPU it is the tensor itself.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor

    def read(self) -> torch.Tensor:
        """The tensor on the host, when it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
