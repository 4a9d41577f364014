"""The compiled call of a module, which PyTorch keeps in a private attribute.

`nn.Module.compile` stores the compiled call there, and `nn.Module.__call__` calls it. Seen in
PyTorch 2.11 and 2.15. Once a name is gone, tests/training/strategies/test_compiled_call.py fails.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

COMPILED_CALL = "_compiled_call_impl"
_NUMBERS = itertools.count()


def compile_whole(model: nn.Module, *, dynamic: bool | None) -> None:
    """Compile `model` in place as one graph, as `torch.compile(model)` does.

    `nn.Module.compile` of PyTorch 2.11 does not compile the forward of PyTorch's own classes, such
    as `nn.Sequential`. It compiles their parts one by one: on an H100 a ResNet-18 then had half
    the speed.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    # PyTorch remembers sizes, and counts how often it compiled, by a function's place and name.
    # Another model in this process must not make this one compile for any size.
    call.__code__ = call.__code__.replace(co_name=f"call_{next(_NUMBERS)}")
    setattr(model, COMPILED_CALL, torch.compile(call, dynamic=dynamic))
