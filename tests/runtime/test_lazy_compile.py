"""Megatron-core's fused functions are compiled at their first call, once. That its import compiles none: engine/test_fsdp2.py."""

from __future__ import annotations

from unittest import mock

import torch

from megappo.runtime.lazy_compile import at_first_call


def test_a_function_is_compiled_at_its_first_call_and_once() -> None:
    made = []

    def compiled(function):
        made.append(function.__name__)
        return lambda *args, **kwargs: ("compiled", function(*args, **kwargs))

    with mock.patch.object(torch, "compile", compiled):

        class Layer:
            @at_first_call
            def scaled(self, x: int, *, by: int) -> int:
                return x * by

        assert made == [] and Layer.scaled.__name__ == "scaled"
        assert [Layer().scaled(2, by=3), Layer().scaled(1, by=4)] == [("compiled", 6), ("compiled", 4)]
        assert made == ["scaled"]


def test_inside_another_compiled_function_it_is_a_part_of_that_one() -> None:
    """With the tracer alone, which breaks the graph where it meets a call of torch.compile."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    inner = at_first_call(lambda x: x * 2)
    outer = torch.compile(lambda x: inner(x) + 1, backend=count, fullgraph=True)
    assert outer(torch.ones(3)).tolist() == [3.0] * 3 and len(graphs) == 1
