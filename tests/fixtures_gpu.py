"""A GPU that is pretended, so that what only happens on one can be tested without.

Tensors say that they lie on `cuda:0` and have their numbers on the host. CUDA graphs are recorded and
replayed as real ones are: operations alone, on the tensors that were there when they were recorded, without
Python in between. What capture does not allow is an error in it: asking the device for a number, shapes
that depend on one, tensors of the host, random numbers of a generator that the graph does not know.
Of real concurrency (streams, events) nothing is seen.
"""

import contextlib
import importlib
import types
import typing

import pytest
import torch
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

HERE = torch.device("cuda", 0)
aten = torch.ops.aten
ASKING = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique_dim", "_unique2",
    "unique_consecutive", "repeat_interleave", "bincount", "multinomial",
}  # fmt: skip
recording = []  # the graph that is being recorded, if any


class OnGPU(torch.Tensor):
    """A tensor that says it lies on the GPU; its numbers are in `inner`."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: HERE)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
        )  # fmt: skip

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"OnGPU({self.inner!r})"

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied, learns = OnGPU(self.inner.clone()), self.requires_grad
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, learns)
            memo[id(self)] = copied
        return memo[id(self)]

    def cpu(self):
        return self.to("cpu")

    def to(self, *args, **kwargs):
        if args and isinstance(args[0], torch.Tensor):  # whose real device is the host
            args = (args[0].device, args[0].dtype, *args[1:])
        named = {name: value for name, value in kwargs.items() if name != "copy"}
        device = torch._C._nn._parse_to(*args, **named)[0]
        if device is None or device.type != "cpu":
            return super().to(*args, **kwargs)
        permit("a copy to the host")
        return self.detach().inner.clone().to(*args, **kwargs)

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Pretend(TorchDispatchMode):
    """Sees the operations that make something on the GPU of nothing, or of tensors of the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def permit(what, allowed=False):
    if recording and not allowed:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def run(func, args, kwargs):
    """One operation: checked, done on the host, and recorded."""
    leaves = tree_flatten((args, kwargs))[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
    asked, name = kwargs.get("device"), func.overloadpacket.__name__
    to_there = bool(there) or (asked is not None and torch.device(asked).type == "cuda")
    generator = kwargs.get("generator")
    if generator is not None and (generator._cdata in Generator.there) != to_there:
        raise RuntimeError(f"{func}: the generator belongs to another device")
    if to_there:
        check(func, name, args, tensors, there, generator)
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    own_args, own_kwargs = tree_map_only(OnGPU, lambda t: t.inner, (args, kwargs))
    call, writes = DONE_OTHERWISE.get(func, func), written(func, own_args, own_kwargs)
    if recording:
        recording[0].keep(writes)
    out = call(*own_args, **own_kwargs)
    if recording and to_there and not is_view(func):
        recording[0].calls.append((call, own_args, own_kwargs, tree_flatten(out)[0]))
    if not to_there or name == "_local_scalar_dense":
        return out
    out = tree_map_only(torch.Tensor, OnGPU, out)
    said = func not in DONE_OTHERWISE and func is not aten.native_batch_norm.default
    return return_and_correct_aliasing(func, args, kwargs, out) if said else out


def check(func, name, args, tensors, there, generator):
    """Raise where a GPU would, and in a capture where that would."""
    moves = func in (aten._to_copy.default, aten.copy_.default)
    mixed = bool(there) and len(there) < len(tensors)
    of_host = [tensor for tensor in tensors if not isinstance(tensor, OnGPU)]
    meet = mixed and any(tensor.ndim for tensor in of_host)
    if meet and not moves and not name.startswith("index"):  # whose indices may
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    if func is aten.copy_.default and not isinstance(args[0], OnGPU):
        permit(f"{func} to the host")
    numbers = name == "where" and not any(t.ndim for t in of_host)  # made there on a real one
    permit(f"{func} of {of_host}", numbers or not of_host)
    permit(str(func), name not in ASKING)
    indices = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    permit(f"{func} by a mask", not masks)
    known = [] if not recording or generator is None else recording[0].generators
    known = not known or generator._cdata in [one._cdata for one in known]
    permit(f"{func} by a generator that the graph does not know", known)


def is_view(func):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def written(func, args, kwargs):
    """Tensors that an operation writes to."""
    if func is aten.native_batch_norm.default:  # which does not say so
        return [t for t in args[3:5] if t is not None and args[5]]
    named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | dict(kwargs)
    found = [
        named[a.name] for a in func._schema.arguments
        if a.alias_info is not None and a.alias_info.is_write and a.name in named
    ]  # fmt: skip
    return [leaf for leaf in tree_flatten(found)[0] if isinstance(leaf, torch.Tensor)]


def convolution(x, weight, bias, stride, padding, dilation, groups):
    return aten.convolution(x, weight, bias, stride, padding, dilation, False, [0, 0], groups)


def fused(x, weight, bias, *how, z=None):
    """A kernel of cuDNN, which takes inputs of one type alone, and checks no shape."""
    found = convolution(x, weight, bias, *how)
    parts = [x, weight, bias, *([] if z is None else [z])]
    if len({part.dtype for part in parts}) > 1 or (z is not None and z.shape != found.shape):
        raise RuntimeError("cuDNN: this cannot be computed")
    return (found if z is None else found + z).relu()


DONE_OTHERWISE = {  # what the host has not
    aten.cudnn_convolution_relu.default: fused,
    aten.cudnn_convolution_add_relu.default: lambda x, w, z, alpha, bias, *how: fused(
        x, w, bias, *how, z=alpha * z
    ),
}


class Graph:
    """A CUDA graph: what was done while it was recorded, to be done again."""

    def __init__(self):
        self.generators = [torch.default_generator]
        self.calls, self.before = [], {}

    def register_generator_state(self, generator):
        self.generators.append(generator)

    def keep(self, tensors):
        """What was in them before the recording: a capture does nothing yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def replay(self):
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for call, args, kwargs, outputs in self.calls:
                found = tree_flatten(call(*args, **kwargs))[0]
                for output, new in zip(outputs, found, strict=True):
                    if isinstance(output, torch.Tensor) and output.data_ptr() != new.data_ptr():
                        output.copy_(new)


@contextlib.contextmanager
def graph(made, stream=None):
    states = [generator.get_state() for generator in made.generators]
    recording.append(made)
    try:
        yield
    finally:
        recording.clear()
        for storage, before in made.before.values():
            storage.copy_(before)
        for generator, state in zip(made.generators, states, strict=True):
            generator.set_state(state)


class Generator(torch.Generator):
    """One that says it belongs to the device."""

    there: typing.ClassVar = {}  # those on the GPU
    device = property(lambda self: HERE if self._cdata in self.there else torch.device("cpu"))

    def __new__(cls, device="cpu"):
        return super().__new__(cls)

    def __init__(self, device="cpu"):
        if torch.device(device).type == "cuda":
            self.there[self._cdata] = self


class Stream:
    def __init__(self, device=None, priority=0):
        self.device = HERE

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self, stream=None):
        pass

    def synchronize(self):
        permit("synchronize")

    def elapsed_time(self, end):
        return 1.0


@pytest.fixture
def pretended_gpu(monkeypatch):
    """`device='cuda'` works as on a GPU, up to what `fixtures_gpu` says."""
    from rholoss.engine import clock, trainer

    if torch.cuda.is_available():
        pytest.skip("there is a real one")
    host = torch.default_generator
    of_device = types.SimpleNamespace(
        get_state=host.get_state, set_state=host.set_state, manual_seed=host.manual_seed,
        get_offset=host.get_state, set_offset=host.set_state,
    )  # fmt: skip
    replaced = {
        "_lazy_init": lambda: None, "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": graph,
        "stream": lambda stream: contextlib.nullcontext(), "current_stream": lambda device=None: Stream(),
        "synchronize": lambda device=None: Event().synchronize(), "current_device": lambda: 0,
        "mem_get_info": lambda device=None: (2**36, 2**37), "default_generators": [of_device],
        "get_rng_state": lambda device=None: host.get_state(),
        "set_rng_state": lambda state, device=None: host.set_state(state),
        "is_bf16_supported": lambda *a, **k: True,
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    autocast, group = torch.autocast, _foreach_utils._group_tensors_by_device_and_dtype

    def grouped(lists, with_indices=False):
        """By what they say of themselves."""
        groups = group(lists, with_indices).items()
        return {
            (HERE if isinstance(found[0][0], OnGPU) else device, dtype): (found, places)
            for (device, dtype), (found, places) in groups
        }

    def one_hot(y, num_classes):
        return (y[..., None] == torch.arange(num_classes, device=y.device)).long()

    monkeypatch.setattr(torch.nn.functional, "one_hot", one_hot)  # torch's goes by the real device
    monkeypatch.setattr(torch, "autocast", lambda kind, **options: autocast("cpu", **options))
    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_group_tensors_by_device_and_dtype", grouped)
    for module in (clock, trainer):
        monkeypatch.setattr(module, "Generator", Generator)
    recording.clear()
    Generator.there.clear()
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes them on the host first
    try:
        with Pretend():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(False)
