"""Bad arguments: the same clear error on CPU, CUDA and Meta; what callers pass is normalised."""

from __future__ import annotations

import gnsilu
import numpy
import pytest
import torch

DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]
BAD = {
    "rank 1": ({"x": (16,)}, "x has 1 dimensions"),
    "rank 0": ({"x": ()}, "x has 0 dimensions"),
    "no groups": ({"num_groups": 0}, "num_groups is 0, x has 128 channels"),
    "-1 groups": ({"num_groups": -1}, "num_groups is -1, x has 128 channels"),
    "-32 groups": ({"num_groups": -32}, "num_groups is -32, x has 128 channels"),
    "7 groups": ({"num_groups": 7}, "num_groups is 7, x has 128 channels"),
    "129 groups": ({"num_groups": 129}, "num_groups is 129, x has 128 channels"),
    "long weight": ({"weight": (129,)}, r"weight has shape \[129\].*128 channels"),
    "short weight": ({"weight": (127,)}, r"weight has shape \[127\]"),
    "weight of one": ({"weight": (1,)}, r"weight has shape \[1\]"),
    "2-D weight": ({"weight": (128, 1)}, r"weight has shape \[128, 1\]"),
    "0-D weight": ({"weight": ()}, r"weight has shape \[\]"),
    "bias without weight": ({"bias": (3,)}, r"bias has shape \[3\]"),
    "negative eps": ({"eps": -1e-5}, "eps is -1e-05"),
    "infinite eps": ({"eps": float("inf")}, "eps is inf"),
    "NaN eps": ({"eps": float("nan")}, "eps is nan"),
    "integer dtype": ({"dtype": torch.int32}, "dtype is Int"),
    "wide dtype": ({"dtype": torch.float64}, "dtype is Double"),
    "complex dtype": ({"dtype": torch.complex64}, "dtype is Complex"),
    "integer x": ({"x_dtype": torch.int64}, "x is Long"),
    "boolean x": ({"x_dtype": torch.bool}, "x is Bool"),
    "complex x": ({"x_dtype": torch.complex64}, "x is a complex tensor"),
    "8-bit x": ({"x_dtype": torch.float8_e4m3fn}, "x is Float8"),
    "integer weight": ({"weight": (128,), "weight_dtype": torch.int32}, "weight is Int"),
}


@pytest.mark.parametrize("name", ["group_norm_silu", "group_norm"])
@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_are_named(bad, where, name):
    change, message = BAD[bad]
    arguments = {"x": (2, 128, 4, 4), "num_groups": 32, **change}
    x = torch.zeros(arguments.pop("x"), device=where)
    x = x.to(arguments.pop("x_dtype", torch.bfloat16))
    weight_dtype = arguments.pop("weight_dtype", torch.float32)
    for parameter in ("weight", "bias"):
        if parameter in arguments:
            shape = arguments[parameter]
            arguments[parameter] = torch.zeros(shape, dtype=weight_dtype, device=where)
    with pytest.raises(RuntimeError, match=message) as raised:
        getattr(gnsilu, name)(x, **arguments)
    assert f"{name}: " in str(raised.value)
    with torch.inference_mode(), pytest.raises(RuntimeError, match=message):
        getattr(gnsilu, name)(x, **arguments)


@pytest.mark.parametrize("argument", ["weight", "bias"])
@pytest.mark.parametrize(
    ("x_device", "other"),
    [
        ("cpu", "meta"),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
        pytest.param("cpu", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_parameters_on_another_device_are_named(argument, x_device, other):
    x = torch.zeros(1, 8, 4, 4, device=x_device)
    parameter = torch.zeros(8, device=other)
    with pytest.raises(RuntimeError, match=f"{argument} is on {other}.*x on {x_device}"):
        gnsilu.group_norm_silu(x, 4, **{argument: parameter})


UNUSUAL = {
    "sparse": lambda: torch.zeros(2, 8, 4).to_sparse(),
    "sparse CSR": lambda: torch.zeros(8, 8).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(2, 8, 4), 0.1, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(8, 4), torch.zeros(8, 5)]),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.zeros(8, 4), torch.zeros(5, 4)], layout=torch.jagged
    ),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse|quantize|torch.ao).*")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_are_refused_by_name(kind, inference):
    if kind == "jagged" and inference:
        inference = False  # there the subclass answers before any op is called
    x = UNUSUAL[kind]()
    name = {"sparse CSR": "sparse", "jagged": "nested"}.get(kind, kind)
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match=f"x is a {name}"):
        gnsilu.group_norm_silu(x, 2)


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse|quantize|torch.ao).*")
@pytest.mark.parametrize("argument", ["weight", "bias"])
def test_unusual_parameters_are_refused_by_name(argument):
    x = torch.zeros(2, 8, 4)
    values = torch.zeros(8)
    for kind, parameter in {
        "a sparse": values.to_sparse(),
        "a quantised": torch.quantize_per_tensor(values, 0.1, 0, torch.quint8),
        "a complex": values.to(torch.complex64),
    }.items():
        with pytest.raises(RuntimeError, match=f"{argument} is {kind}"):
            gnsilu.group_norm_silu(x, 2, **{argument: parameter})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": [1.0]}, "x is a list"),
        ({"x": numpy.zeros((1, 4))}, "x is a ndarray"),
        ({"num_groups": 4.5}, "num_groups is 4.5; a whole number"),
        ({"num_groups": float("nan")}, "num_groups is nan; a whole number"),
        ({"num_groups": "4"}, "num_groups is the string '4'"),
        ({"num_groups": None}, "num_groups is a NoneType"),
        ({"num_groups": b"4"}, "num_groups is the string"),
        ({"num_groups": torch.tensor(4 + 0j)}, "num_groups is a complex tensor"),
        ({"num_groups": torch.tensor(4, device="meta")}, "num_groups is a Tensor"),
        ({"eps": 10**400}, "eps is a int"),
        ({"num_groups": torch.tensor([1, 2])}, "num_groups is a Tensor"),
        ({"weight": 1.0}, "weight is a float"),
        ({"bias": [0.0] * 4}, "bias is a list"),
        ({"eps": "small"}, "eps is the string 'small'"),
        ({"eps": None}, "eps is a NoneType"),
        ({"dtype": "bfloat16"}, "dtype is a str"),
    ],
)
def test_wrong_python_types_are_type_errors(arguments, message):
    arguments = {"x": torch.zeros(1, 4, 2), "num_groups": 2, **arguments}
    for function in (gnsilu.group_norm_silu, gnsilu.group_norm, gnsilu.explain):
        with pytest.raises(TypeError, match=message):
            function(**arguments)


@pytest.mark.parametrize(
    "groups",
    [4, 4.0, numpy.int64(4), numpy.float32(4), torch.tensor(4), torch.tensor(4.0)],
    ids=repr,
)
@pytest.mark.parametrize("eps", [1e-3, numpy.float64(1e-3), torch.tensor(1e-3, dtype=torch.double)])
def test_whole_numbers_of_other_types(groups, eps):
    x = torch.randn(2, 8, 5, 5).to(torch.bfloat16)
    want = gnsilu.group_norm_silu(x, 4, eps=1e-3)
    assert torch.equal(gnsilu.group_norm_silu(x, groups, eps=eps), want)


def test_true_is_one_group_and_one_is_an_eps():
    x = torch.randn(2, 8, 5, 5).to(torch.bfloat16)
    want = gnsilu.group_norm_silu(x, 1, eps=1.0)
    assert torch.equal(gnsilu.group_norm_silu(x, True, eps=1), want)


def test_default_dtype_and_device_do_not_enter(device):
    x = torch.randn(2, 8, 5, 5, device=device).to(torch.bfloat16)
    want = gnsilu.group_norm_silu(x, 4)
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        assert torch.equal(gnsilu.group_norm_silu(x, 4), want)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(default)
        torch.set_default_device(None)
