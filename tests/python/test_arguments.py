"""Bad arguments: the same clear error on CPU, CUDA and Meta; what callers pass is normalised."""

from __future__ import annotations

import contextlib

import gnsilu
import numpy
import pytest
import torch

DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]
FUNCTIONS = (gnsilu.group_norm_silu, gnsilu.group_norm)


def assert_refused(message: str, x: torch.Tensor, **arguments: object) -> None:
    """By both functions, with and without autograd; and the next good call is served."""
    for function in FUNCTIONS:
        for context in (contextlib.nullcontext(), torch.inference_mode()):
            with context, pytest.raises(RuntimeError, match=message) as raised:
                function(x, **arguments)
            assert f"{function.__name__}: " in str(raised.value)
    with pytest.raises(RuntimeError, match=message):
        gnsilu.explain(x, **arguments)
    good = torch.ones(1, 2, 3, device=x.device)
    assert gnsilu.group_norm_silu(good, 1).shape == good.shape


@pytest.mark.parametrize("where", DEVICES)
def test_case_22_groups_that_do_not_divide_are_named(where):
    for channels in (1, 30, 128):
        x = torch.zeros(2, channels, 4, 4, dtype=torch.bfloat16, device=where)
        some = {0, -1, -32, -(2**31), -(2**63), 7, 129, 2**31, 2**32 + 1, 2**63 - 1}
        for groups in sorted(some | set(range(-3, channels + 3))):
            if groups >= 1 and channels % groups == 0:
                continue
            assert_refused(
                rf"num_groups is {groups}, x has {channels} channels;", x, num_groups=groups
            )
    with pytest.raises(ValueError, match="num_groups is 9223372036854775808; a 64-bit number"):
        gnsilu.group_norm_silu(x, 2**63)


@pytest.mark.parametrize("other", [None, "right"])
@pytest.mark.parametrize("argument", ["weight", "bias"])
@pytest.mark.parametrize("where", DEVICES)
def test_case_23_parameters_of_another_shape_are_named(where, argument, other):
    x = torch.zeros(2, 128, 4, 4, dtype=torch.bfloat16, device=where)
    arguments = {"weight": None, "bias": None}
    if other == "right":  # the other one is as it should be
        arguments = dict.fromkeys(arguments, torch.ones(128, device=where))
    for shape in ((129,), (127,), (1,), (0,), (64,), (), (128, 1), (1, 128), (1, 128, 1, 1)):
        for dtype in (torch.float32, torch.bfloat16):
            arguments[argument] = torch.zeros(shape, dtype=dtype, device=where)
            shown = ", ".join(map(str, shape))
            message = (
                rf"{argument} has shape \[{shown}\].* 128 channels of x is wanted, shape \[128\]"
            )
            assert_refused(message, x, num_groups=32, **arguments)


@pytest.mark.parametrize("argument", ["weight", "bias"])
@pytest.mark.parametrize(
    ("x_device", "other"),
    [
        ("cpu", "meta"),
        ("meta", "cpu"),
        pytest.param("cuda", "cpu", marks=pytest.mark.gpu),
        pytest.param("cuda", "meta", marks=pytest.mark.gpu),
        pytest.param("cpu", "cuda", marks=pytest.mark.gpu),
        pytest.param("cuda:1", "cuda:0", marks=pytest.mark.two_gpus),
    ],
)
def test_case_23_parameters_on_another_device_are_named(argument, x_device, other):
    x = torch.zeros(1, 8, 4, 4, dtype=torch.bfloat16, device=x_device)
    parameter = torch.zeros(8, device=other)
    message = f"{argument} is on {other}.*x on {x_device}"
    with pytest.raises(RuntimeError, match=message):
        gnsilu.group_norm_silu(x, 4, **{argument: parameter})
    with pytest.raises(RuntimeError, match=message):
        gnsilu.group_norm_silu(x, 4, **{argument: parameter.requires_grad_()})


BAD = {
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
    "integer weight": ({"weight_dtype": torch.int32}, "weight is Int"),
}


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("bad", BAD)
def test_bad_arguments_are_named(bad, where):
    change, message = BAD[bad]
    arguments = {"num_groups": 32, **change}
    x = torch.zeros(2, 128, 4, 4, device=where).to(arguments.pop("x_dtype", torch.bfloat16))
    if "weight_dtype" in arguments:
        dtype = arguments.pop("weight_dtype")
        arguments["weight"] = torch.zeros(128, dtype=dtype, device=where)
    assert_refused(message, x, **arguments)


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
        ({"eps": 1e-5 + 0j}, "eps is a complex; a real number is wanted"),
        ({"eps": numpy.complex64(1e-5)}, "eps is a complex64; a real number is wanted"),
        ({"num_groups": numpy.clongdouble(4)}, "num_groups is a clongdouble; a real"),
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


# --- numbers of other types ---------------------------------------------------------------------


def numbers(value: float) -> dict[str, object]:
    """What callers have at hand in place of a plain number."""
    numbers = {
        "float": float(value),
        "numpy float64": numpy.float64(value),
        "numpy float32": numpy.float32(value),
        "numpy float16": numpy.float16(value),
        "numpy 0-d array": numpy.array(value),
        "0-d float64": torch.tensor(value, dtype=torch.float64),
        "0-d float32": torch.tensor(value),
        "0-d bfloat16": torch.tensor(value, dtype=torch.bfloat16),
    }
    if value == int(value):
        numbers |= {
            "int": int(value),
            "numpy int64": numpy.int64(value),
            "numpy uint8": numpy.uint8(value),
            "0-d int64": torch.tensor(int(value)),
            "0-d uint8": torch.tensor(int(value), dtype=torch.uint8),
        }
    if value == 1:
        numbers |= {"True": True, "numpy True": numpy.True_, "0-d True": torch.tensor(True)}
    return numbers


# Powers of two: the same number in every type.
NUM_GROUPS, EPS = (1, 4, 32), (1, 2.0**-10, 0)


def call(x: torch.Tensor, num_groups: object, eps: object) -> torch.Tensor:
    return gnsilu.group_norm_silu(x, num_groups, eps=eps)


def example() -> torch.Tensor:
    torch.manual_seed(5)
    return (torch.randn(2, 32, 5, 5) / 32).to(torch.bfloat16)


def test_case_36_numbers_of_other_types():
    x = example()
    for value in NUM_GROUPS:
        want = call(x, value, 1e-5)
        for number in numbers(value).values():
            assert torch.equal(call(x, number, 1e-5), want)
            assert gnsilu.explain(x, number) == gnsilu.explain(x, value)
            assert gnsilu.GroupNormSiLU(number, 32).num_groups == value
    for value in EPS:
        want = call(x, 4, float(value))
        for number in numbers(value).values():
            assert torch.equal(call(x, 4, number), want)
            assert gnsilu.GroupNormSiLU(4, 32, number).eps == value


# Each compilation takes a while: one of each sort.
SORTS = ("int64", "float32", "float64", "True")
COMPILED = ["int", "float", "True", *(f"{of} {sort}" for of in ("numpy", "0-d") for sort in SORTS)]


def compiled(fullgraph: bool, backend: str):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=fullgraph, backend=backend)


@pytest.mark.parametrize("kind", COMPILED)
def test_case_36_compiled(kind):
    x = example()
    function = compiled(fullgraph=False, backend="eager")
    for num_groups, eps in ((4, 1), (1, 4), (1, 1)):  # the second by what was made for the first
        if kind in numbers(num_groups) and kind in numbers(eps):
            y = function(x, numbers(num_groups)[kind], numbers(eps)[kind])
            assert torch.equal(y, call(x, num_groups, float(eps)))


@pytest.mark.parametrize("kind", COMPILED)
def test_case_36_compiled_without_graph_breaks(kind):
    """Plain numbers give the same answer. Dynamo takes the others for tensors: it may refuse a
    number that it would know at run time only, by name."""

    def check(name: str, function, arguments: tuple[object, object], want: torch.Tensor) -> None:
        try:
            y = function(x, *arguments)
        except (RuntimeError, AssertionError) as error:  # 2.15 asserts on a bool of numpy's
            assert kind not in ("int", "float", "True") and name in str(error)
        else:
            assert torch.equal(y, want)

    x = example()
    function = compiled(fullgraph=True, backend="aot_eager")
    for value in NUM_GROUPS:
        if kind in numbers(value):
            check("num_groups", function, (numbers(value)[kind], 1e-5), call(x, value, 1e-5))
    function = compiled(fullgraph=True, backend="aot_eager")
    for value in EPS:
        if kind in numbers(value):
            check("eps", function, (4, numbers(value)[kind]), call(x, 4, float(value)))
