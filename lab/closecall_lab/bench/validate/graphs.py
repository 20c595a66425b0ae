"""CUDA graphs: what can be captured, what a replay gives, and calls on streams of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Call = Callable[[], Tensor]
WARM_UPS = 2  # the first call compiles


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Also where both are NaN."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(kind), b.view(kind))


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Within it, whatever makes the host wait for the device raises a RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """A new stream, which begins after what was asked for before, and which what is asked for later waits for."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


class Graphs:
    """Graphs that share one pool of memory: they are replayed one at a time, and each overwrites the others' work."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Call) -> tuple[Callable[[], None], Tensor]:
        """What replays the call, and the tensor that a replay writes its output to. RuntimeError if it cannot be."""
        with _aside():  # compiles, and fills caches, off the stream that is captured
            for _ in range(WARM_UPS):
                call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            captured = call()
        return graph.replay, captured


def problem(call: Call, q: Tensor, other: Tensor) -> str | None:
    """Why `call`, which reads `q`, cannot run without waiting for the host or be captured; None if it can. The graph
    is replayed on the queries `other`."""
    with _aside():
        for _ in range(WARM_UPS):
            call()
    try:
        with no_waiting():
            call()
    except RuntimeError as error:
        return f"the host waits for the device: {first_line(error)}"
    try:
        replay, captured = Graphs().capture(call)
    except RuntimeError as error:
        return f"no graph can be captured: {first_line(error)}"
    q.copy_(other)
    replay()
    torch.cuda.synchronize()
    if not same_bits(captured, call()):
        return "the graph replayed on other queries does not give what a plain call gives"
    return None


def on_streams(call: Call) -> list[Tensor]:
    """The call on two new streams, neither of which waits for the other, and then as usual."""
    made = []
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for stream in streams:
        with torch.cuda.stream(stream):
            made.append(call())
    torch.cuda.synchronize()
    return [*made, call()]
