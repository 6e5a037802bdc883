"""The rules of the operation, as errors that name argument, rule and got-value.

They run on the fakes, in `why_not`, and when the compiled host code has refused a call: the hot
path itself never comes here. Types raise TypeError, shapes, strides and devices ValueError, what
the operation allows but no kernel does NotImplementedError.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ops import add_op_namespace_prefix

MAX_WIDTH = 8
# The CUDA backward counts the rows of a batch row in 32 bits.
MAX_BWD_ROWS = 2**31 - 64
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INDICES = (torch.int32, torch.int64)
FLAGS = (torch.bool,)
ACTIVATIONS = {None: False, "silu": True, "swish": True}
# A build without CUDA kernels serves the CPU alone.
DEVICES = tuple(
    device
    for device in ("cpu", "cuda")
    if torch._C._dispatch_has_kernel_for_dispatch_key(
        add_op_namespace_prefix("fwd"), device.upper()
    )
)


def activation(name: object) -> bool:
    """Whether SiLU follows the convolution."""
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        raise ValueError(f"activation must be None, 'silu' or 'swish', got {name!r}") from None


def is_differentiated(*tensors: Tensor | None) -> bool:
    """Whether gradients, or forward-mode tangents, are to flow through any of them."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                return True
    return forward_ad._current_level >= 0 and any(map(_has_tangent, tensors))


def _has_tangent(tensor: Tensor | None) -> bool:
    return isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None


def no_gradients(**tensors: Tensor | None) -> None:
    """Of an op without a backward."""
    for name, tensor in tensors.items():
        if is_differentiated(tensor):
            raise NotImplementedError(
                f"{name} must not require a gradient: this op is for inference only, "
                f"got {name}.requires_grad={tensor.requires_grad} under an enabled grad mode"
            )


def reverse_mode(**tensors: Tensor | None) -> None:
    """Of a call that is differentiated."""
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "causal_conv1d must be differentiated by torch.autograd, "
            "got a call under a transform of torch.func"
        )
    for name, tensor in tensors.items():
        if forward_ad._current_level >= 0 and _has_tangent(tensor):
            raise NotImplementedError(
                f"{name} must not carry a tangent: there is no forward-mode kernel, "
                "got a dual tensor"
            )


def inference_options(**options: Tensor | None) -> None:
    """Of a call that is differentiated: what it may not be given."""
    for name, option in options.items():
        if option is not None:
            raise NotImplementedError(
                f"{name} must not be given where a gradient is needed: it is for inference only, "
                f"got a {type(option).__name__}"
            )


def is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def needs_state(
    state_indices: Tensor | None, has_initial_state: Tensor | None, final_state_out: Tensor | None
) -> None:
    """Of a call without initial_state."""
    if has_initial_state is not None:
        raise ValueError("has_initial_state must come with initial_state, got initial_state=None")
    if state_indices is not None and final_state_out is None:
        raise ValueError(
            "state_indices must come with the pool that it indexes, got initial_state=None and "
            "final_state_out=None"
        )


def state_len(columns: object, least: int) -> None:
    if not isinstance(columns, (int, torch.SymInt)):
        raise TypeError(f"state_len must be an int, got {type(columns).__name__}")
    if columns < least:
        raise ValueError(f"state_len must be at least {least}, got {columns}")


def new_state(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    columns: int | None,
    initial_state: Tensor | None,
) -> None:
    """What a final state's size is taken from."""
    _activations("x", x, dims=(3,), shape="[B, T, D]")
    W = _weight(weight, x, x.shape[2])
    if cu_seqlens is not None:
        _offsets(cu_seqlens, x)
    if initial_state is not None:
        is_tensor("initial_state", initial_state)
    if columns is not None:
        state_len(columns, W - 1)


def new_states(x: Tensor, cu_seqlens: Tensor, columns: int) -> None:
    """The same for `states`."""
    _activations("x", x, dims=(2,), shape="[T_total, D]")
    _offsets(cu_seqlens, x)
    state_len(columns, 0)


def fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    silu: bool,
) -> None:
    """What the op `fwd` accepts, in its own argument order."""
    N, D, W = _convolution(x, weight, bias, cu_seqlens, seq_idx)
    if state_indices is not None:
        _index("state_indices", state_indices, x, "[N]", (N,))
    if has_initial_state is not None:
        _index("has_initial_state", has_initial_state, x, "[N]", (N,), FLAGS)
    count = None if state_indices is not None else N
    states = {"initial_state": initial_state, "final_state": final_state}
    for name, state in states.items():
        if state is not None:
            _state(name, state, x, count, D, W)
    pools = initial_state is not None and final_state is not None and state_indices is not None
    if pools and initial_state.shape[0] != final_state.shape[0]:
        raise ValueError(
            "initial_state and final_state must have the same number of slots, got "
            f"{initial_state.shape[0]} and {final_state.shape[0]}"
        )
    _out(out, x)
    if final_state is not None:
        _written("final_state", final_state)
        _apart("final_state", final_state, "x", x)
        _apart("out", out, "final_state", final_state)
        if initial_state is not None and not _same_view(initial_state, final_state):
            _apart("final_state", final_state, "initial_state", initial_state)
    if initial_state is not None:
        _apart("out", out, "initial_state", initial_state)


def bwd(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    dfinal_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dinitial_state: Tensor | None,
    silu: bool,
) -> None:
    """What the op `bwd` accepts, in its own argument order."""
    N, D, W = _convolution(x, weight, bias, cu_seqlens, seq_idx)
    if x.device.type != "cpu" and x.shape[1] >= MAX_BWD_ROWS:
        raise NotImplementedError(
            f"x must have T < {MAX_BWD_ROWS} for a gradient on cuda, got T={x.shape[1]}"
        )
    _shaped_like("dy", dy, "x", x, x)
    for name, state in {"initial_state": initial_state, "dfinal_state": dfinal_state}.items():
        if state is not None:
            _state(name, state, x, N, D, W)
    read = {"x": x, "dy": dy, "weight": weight, "bias": bias, "initial_state": initial_state,
            "dfinal_state": dfinal_state}  # fmt: skip
    written = {"dx": dx, "dweight": dweight, "dbias": dbias, "dinitial_state": dinitial_state}
    for name, gradient in written.items():
        if gradient is None:
            continue
        of = read[name[1:]]
        if of is None:
            raise ValueError(f"{name} must come with {name[1:]}, got no {name[1:]}")
        _shaped_like(name, gradient, name[1:], of, x)
        _written(name, gradient)
        for other_name, other in {**read, **written}.items():
            if other is not None and other_name != name:
                _apart(name, gradient, other_name, other)


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    silu: bool,
) -> None:
    """What the op `update` accepts, in its own argument order."""
    varlen = cu_seqlens is not None
    shape = "[T_total, D] when cu_seqlens is given" if varlen else "[B, D] or [B, D, T]"
    _activations("x", x, dims=(2,) if varlen else (2, 3), shape=shape)
    D = x.shape[1]
    W = _weight(weight, x, D)
    _bias(bias, x, D)
    N = _offsets(cu_seqlens, x) if varlen else x.shape[0]
    _state("conv_state", conv_state, x, None if conv_state_indices is not None else N, D, W)
    if cache_seqlens is not None and num_accepted_tokens is not None:
        raise ValueError("cache_seqlens and num_accepted_tokens must not both be given, got both")
    if cache_seqlens is not None and conv_state.shape[2] == 0:
        raise ValueError("conv_state must have L >= 1 when cache_seqlens is given, got L=0")
    vectors = {
        "conv_state_indices": conv_state_indices,
        "cache_seqlens": cache_seqlens,
        "num_accepted_tokens": num_accepted_tokens,
    }
    for name, vector in vectors.items():
        if vector is not None:
            _index(name, vector, x, "[N]", (N,))
    _out(out, x)
    _written("conv_state", conv_state)
    _apart("conv_state", conv_state, "x", x)
    _apart("out", out, "conv_state", conv_state)


def states(x: Tensor, cu_seqlens: Tensor, final_state: Tensor) -> None:
    """What the op `states` accepts."""
    _activations("x", x, dims=(2,), shape="[T_total, D]")
    _state("final_state", final_state, x, _offsets(cu_seqlens, x), x.shape[1], 1)
    _written("final_state", final_state)
    _apart("final_state", final_state, "x", x)


def _shape(tensor: Tensor) -> list:
    return list(tensor.shape)


def _floats(x: Tensor) -> tuple[torch.dtype, ...]:
    return (*FLOATS, torch.float64) if x.dtype == torch.float64 else FLOATS


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[int, int, int]:
    """(N, D, W) of what forward and backward are told alike: x, taps and sequences."""
    _activations("x", x, dims=(3,), shape="[B, T, D]")
    B, T, D = x.shape
    if cu_seqlens is not None and seq_idx is not None:
        raise ValueError("cu_seqlens and seq_idx must not both be given, got both")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"x must be [1, T, D] when cu_seqlens is given, got {_shape(x)}")
    W = _weight(weight, x, D)
    _bias(bias, x, D)
    N = _offsets(cu_seqlens, x) if cu_seqlens is not None else B
    if seq_idx is not None:
        _index("seq_idx", seq_idx, x, "[B, T]", (B, T))
    return N, D, W


def _tensor(name: str, tensor: object, x: Tensor) -> None:
    is_tensor(name, tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise NotImplementedError(
            f"{name} must not be inside a transform of torch.func: there is no batching rule, "
            "got a wrapped tensor"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be strided, got {tensor.layout}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")


def _activations(name: str, x: object, dims: tuple[int, ...], shape: str) -> None:
    _tensor(name, x, x)
    if x.device.type not in (*DEVICES, "meta"):
        raise NotImplementedError(
            f"{name} must be on {' or '.join(DEVICES)}, where this build has kernels, "
            f"got {x.device}"
        )
    if x.dtype == torch.float64 and x.device.type == "cuda":
        raise NotImplementedError(f"{name} in float64 runs on cpu only, got {x.device}")
    if x.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"{name} must be bfloat16, float16, float32 or float64, got {x.dtype}")
    if x.dim() not in dims:
        raise ValueError(f"{name} must be {shape}, got {_shape(x)}")


def _like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    _tensor(name, tensor, x)
    if tensor.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{name} must have x's dtype {x.dtype} or float32, got {tensor.dtype}")


def _weight(weight: Tensor, x: Tensor, D: int) -> int:
    _like_x("weight", weight, x)
    if weight.dim() != 2 or weight.shape[0] != D or not 1 <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(
            f"weight must have shape [D, W] with D={D} and W from 1 to {MAX_WIDTH}, "
            f"got {_shape(weight)}"
        )
    return weight.shape[1]


def _bias(bias: Tensor | None, x: Tensor, D: int) -> None:
    if bias is None:
        return
    _like_x("bias", bias, x)
    if tuple(bias.shape) != (D,):
        raise ValueError(f"bias must have shape [D] with D={D}, got {_shape(bias)}")


def _index(
    name: str,
    index: Tensor,
    x: Tensor,
    rule: str,
    shape: tuple[int, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] = INDICES,
) -> None:
    """shape None: a vector of one entry or more."""
    _tensor(name, index, x)
    if index.dtype not in dtypes:
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {known}, got {index.dtype}")
    if shape is None:
        fits, known = index.dim() == 1 and index.shape[0] >= 1, ""
    else:
        fits, known = tuple(index.shape) == shape, f" = {list(shape)}"
    if not fits:
        raise ValueError(f"{name} must have shape {rule}{known}, got {_shape(index)}")


def _offsets(cu_seqlens: Tensor, x: Tensor) -> int:
    """N, the number of sequences."""
    _index("cu_seqlens", cu_seqlens, x, "[N + 1]")
    return cu_seqlens.shape[0] - 1


def _state(name: str, state: Tensor, x: Tensor, count: int | None, D: int, W: int) -> None:
    _tensor(name, state, x)
    if state.dtype not in _floats(x):
        raise TypeError(f"{name} must be one of {_floats(x)}, got {state.dtype}")
    rows = "S" if count is None else "N"
    if (
        state.dim() != 3
        or (count is not None and state.shape[0] != count)
        or state.shape[1] != D
        or state.shape[2] < W - 1
    ):
        known = f"D={D}" if count is None else f"N={count}, D={D}"
        raise ValueError(
            f"{name} must have shape [{rows}, D, L] with {known} and L >= W-1 = {W - 1}, "
            f"got {_shape(state)}"
        )


def _shaped_like(name: str, tensor: Tensor, other_name: str, other: Tensor, x: Tensor) -> None:
    _tensor(name, tensor, x)
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name} must have {other_name}'s dtype {other.dtype}, got {tensor.dtype}")
    if tensor.shape != other.shape:
        raise ValueError(
            f"{name} must have {other_name}'s shape {_shape(other)}, got {_shape(tensor)}"
        )


def _out(out: Tensor, x: Tensor) -> None:
    _shaped_like("out", out, "x", x, x)
    _written("out", out)
    _apart("out", out, "x", x)


def _written(name: str, tensor: Tensor) -> None:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{name} is written and must not be expanded, got stride 0 in dim {dim}"
            )


def _has_storage(*tensors: Tensor) -> bool:
    return all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type != "meta" for t in tensors)


def _same_view(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    return (
        _has_storage(a, b)
        and a.data_ptr() == b.data_ptr()
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, first + (last + 1) * tensor.element_size()


def _disjoint_columns(a: Tensor, b: Tensor) -> bool:
    """Two column slices of one wider row interleave without sharing an element."""
    alike = (a.shape, a.stride(), a.element_size()) == (b.shape, b.stride(), b.element_size())
    if a.dim() < 2 or not alike:
        return False
    D, pitch = a.shape[-1], a.stride(-2)
    if a.stride(-1) != 1 or pitch <= 0:
        return False
    if any(size > 1 and s % pitch for size, s in zip(a.shape[:-1], a.stride()[:-1], strict=True)):
        return False
    shift, rest = divmod(b.data_ptr() - a.data_ptr(), a.element_size())
    return rest == 0 and shift % pitch >= D and pitch - shift % pitch >= D


def _apart(name: str, written: Tensor, other_name: str, other: Tensor) -> None:
    if not _has_storage(written, other):
        return
    (a0, a1), (b0, b1) = _extent(written), _extent(other)
    if a0 < b1 and b0 < a1 and not _disjoint_columns(written, other):
        raise ValueError(f"{name} must not overlap {other_name}, got overlapping storage")
