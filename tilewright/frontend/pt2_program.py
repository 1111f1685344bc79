"""The JSON of a .pt2 file, checked before PyTorch's deserialiser sees it.

That deserialiser is meant for trusted files: it evaluates symbolic sizes as Python text, imports modules that the description of nested inputs names,
looks up any name of ``torch`` as an operator, and generates Python source from node names. So it receives only a program rebuilt here from the file:
every field has a check, which returns the value to use, and fields without a check are dropped.

| field | accepted |
|---|---|
| names of values | identifiers |
| operators | those of ATen and torchvision that return tensors; whole arithmetic; regions without gradients or with autocast |
| sizes, strides | integers, and expressions of symbols (`pt2_sizes`) |
| inputs and outputs | tensors and constants in tuples, lists, dictionaries and registered named tuples |
| metadata | the path of modules, file and line |
| guards, ranges | conditions on sizes (`pt2_sizes`), integers |
| verifiers, further signatures | nothing |
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tilewright.errors import InvalidModel, TilewrightError, UnsupportedOperator
from tilewright.frontend.pt2_sizes import SYMBOL, expression, guard
from tilewright.frontend.reading import LARGEST_VALUE, printable

LARGEST_RANK = 64
"""Maximum rank of a tensor in a file, PyTorch's limit for operators."""

Check = Callable[[Any, str], Any]
"""Maps a value of the file and its place to the value to use; raises ValueError, which names the place."""

_TENSORS = "keep them tensors, or compile the parts of the module around them"
_PASS_IT = "load it yourself with torch.export.load, if you trust it, and pass the exported program"
_REGIONS = ("torch.ops.higher_order.wrap_with_set_grad_enabled", "torch.ops.higher_order.wrap_with_autocast")
_WHOLE = re.compile(
    r"_operator\.(add|sub|mul|floordiv|mod|neg|eq|ne|lt|le|gt|ge|and_|or_)|torch\.sym_(max|min|not)|torch\.ops\.aten\.sym_(size|numel)(\.int|\.default)?"
)
"""Operators on sizes."""
_SYMBOLIC = re.compile(r"_operator\.\w+|math\.\w+|torch\.sym_\w+|torch\._sym_\w+|torch\.ops\.aten\.(sym_\w+|item|_local_scalar_dense)(\.\w+)?")
_OPERATOR = re.compile(r"torch\.ops\.(aten|torchvision)\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)")
_FILES = ("from_file", "save")
"""ATen operators that open files given by name."""
_DEEPEST_CONTAINER = 50


def checked(document: Any) -> dict[str, Any]:
    """The program for PyTorch's deserialiser. Raises ValueError if the document is not a program or its parts do not fit together, and InvalidModel
    or UnsupportedOperator for programs that cannot be compiled, for instance because of symbolic sizes."""
    result: dict[str, Any] = _PROGRAM(document, "program")
    module = result["graph_module"]
    if not module["module_call_graph"]:
        raise ValueError("program.graph_module.module_call_graph is empty")
    call = module["module_call_graph"][0]["signature"]
    arguments, returned = (_specification(call[name]) for name in ("in_spec", "out_spec"))
    if arguments.type is not tuple or [child.type for child in _children(arguments)] != [tuple, dict]:
        raise ValueError("the inputs are not positional and keyword arguments")
    if not all(isinstance(key, str) and _is_name(key) for key in _children(arguments)[1].context):
        raise ValueError("a keyword of the inputs is no name")
    specs = module["signature"]
    taken = sum(next(iter(spec)) in ("user_input", "constant_input") for spec in specs["input_specs"])
    given = sum("user_output" in spec for spec in specs["output_specs"])
    if (arguments.num_leaves, returned.num_leaves) != (taken, given):
        raise ValueError("the numbers of inputs and outputs are not those of the call")
    if (len(specs["input_specs"]), len(specs["output_specs"])) != (len(module["graph"]["inputs"]), len(module["graph"]["outputs"])):
        raise ValueError("the graph's inputs and outputs are not those of the signature")
    return result


def payloads(document: Any) -> dict[str, Any]:
    """The entries of a configuration of weights or constants: name → {"path_name", "is_param", "use_pickle", "tensor_meta"}."""
    result: dict[str, Any] = _PAYLOADS(document, "weights")["config"]
    return result


def integers(sizes: Sequence[Mapping[str, int]]) -> tuple[int, ...]:
    """Checked sizes or strides as integers."""
    return tuple(size["as_int"] for size in sizes)


def device(entry: Mapping[str, Any]) -> torch.device:
    """A checked device."""
    return torch.device(entry["type"]) if entry.get("index") is None else torch.device(entry["type"], entry["index"])


# --- checks -----------------------------------------------------------------------------------------------------------


def _wrong(place: str, expected: str) -> ValueError:
    return ValueError(f"{printable(place)} is not {expected}")


def _of(kind: type, expected: str) -> Check:
    def check(value: Any, place: str) -> Any:
        if type(value) is not kind:
            raise _wrong(place, expected)
        return value

    return check


def _integer(value: Any, place: str) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise _wrong(place, "a 64-bit integer")
    return value


def _size(value: Any, place: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_VALUE:
        raise _wrong(place, "a size")
    return value


def _number(value: Any, place: str) -> float:
    """A number; infinities are text, because JSON has none."""
    if value in ("Infinity", "-Infinity", "NaN"):
        return float(value)
    if type(value) not in (int, float):
        raise _wrong(place, "a number")
    return float(value)


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text) and len(text) <= 1000


def _name(value: Any, place: str) -> str:
    if type(value) is not str or not _is_name(value):
        raise _wrong(place, "a name")
    return value


def _keyword(value: Any, place: str) -> str:
    return "" if value == "" else _name(value, place)


def _path(value: Any, place: str) -> str:
    """The name of a parameter or buffer, safe for attribute access and in generated source."""
    if type(value) is not str or not value.isprintable() or set(value) & set("\"'\\{}") or not 0 < len(value) <= 1000:
        raise _wrong(place, "the name of a tensor")
    return value


def _member(value: Any, place: str) -> str:
    if type(value) is not str or not re.fullmatch(r"[A-Za-z0-9_]+", value):
        raise _wrong(place, "the name of a member")
    return value


def _list(of: Check) -> Check:
    def check(value: Any, place: str) -> list[Any]:
        if type(value) is not list:
            raise _wrong(place, "a list")
        return [of(item, f"{place}[{index}]") for index, item in enumerate(value)]

    return check


def _table(key: Check, of: Check) -> Check:
    def check(value: Any, place: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise _wrong(place, "a table")
        return {key(name, place): of(item, f"{place}.{name}") for name, item in value.items()}

    return check


def _optional(of: Check) -> Check:
    return lambda value, place: None if value is None else of(value, place)


def _record(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """A check of records: unknown fields are dropped, absent optional fields stay absent."""
    fields = {**required, **(optional or {})}

    def check(value: Any, place: str) -> dict[str, Any]:
        if type(value) is not dict or not required.keys() <= value.keys():
            raise _wrong(place, f"a record of {', '.join(required)}")
        return {name: of(value[name], f"{place}.{name}") for name, of in fields.items() if name in value}

    return check


def _union(of: Mapping[str, Check]) -> Check:
    """A check of tagged unions: records of one field, whose name is the tag."""

    def check(value: Any, place: str) -> dict[str, Any]:
        if type(value) is not dict or len(value) != 1 or next(iter(value)) not in of:
            raise _wrong(place, f"one of {', '.join(of)}")
        ((name, item),) = value.items()
        return {name: of[name](item, f"{place}.{name}")}

    return check


def _refused(kind: type[TilewrightError], cause: str, remedy: str) -> Check:
    def check(value: Any, place: str) -> Any:
        raise kind(f"the program {cause}", remedy)

    return check


def _nothing(empty: Any) -> Check:
    return lambda value, place: empty


_boolean, _text = _of(bool, "true or false"), _of(str, "text")
_symbolic = _refused(InvalidModel, "computes with fractions made from sizes, or with Python numbers made from tensors", _TENSORS)
_sub_program = _refused(UnsupportedOperator, "holds a sub-program", "replace torch.cond and similar control flow")
_script_object = _refused(UnsupportedOperator, "uses script objects", "pass tensors and Python numbers")
_trained = _refused(UnsupportedOperator, "returns gradients, parameters or tokens", "export it for inference")


def _scalar_type(value: Any, place: str) -> int:
    if type(value) is not int or not 0 < value < 100:
        raise _wrong(place, "an element type")
    return value


def _strided(value: Any, place: str) -> int:
    if value != 7:  # Layout.Strided
        raise UnsupportedOperator("the program holds sparse tensors", "convert them to dense ones")
    return 7


def _device_type(value: Any, place: str) -> str:
    if value not in ("cpu", "cuda"):
        raise _wrong(place, "a device that is supported, cpu or cuda")
    return str(value)


_expression = _record({"expr_str": expression}, {"hint": _optional(_union({"as_int": _integer, "as_bool": _boolean}))})
_extent = _union({"as_int": _size, "as_expr": _expression})
_device = _record({"type": _device_type}, {"index": _optional(_size)})


def _meta(extent: Check) -> Check:
    """Checks a tensor's description, whose sizes are checked by `extent`; symbolic ones count as what they were at export."""
    fields = {"sizes": _list(extent), "strides": _list(extent), "storage_offset": extent}
    record = _record({"dtype": _scalar_type, "requires_grad": _boolean, "device": _device, "layout": _strided, **fields})

    def check(value: Any, place: str) -> dict[str, Any]:
        meta: dict[str, Any] = record(value, place)
        sizes = [size["as_int"] if "as_int" in size else (size["as_expr"].get("hint") or {}).get("as_int", 1) for size in meta["sizes"]]
        if not len(sizes) == len(meta["strides"]) <= LARGEST_RANK or math.prod(sizes) > LARGEST_VALUE:
            raise _wrong(place, "a tensor of a size that fits any machine")
        return meta

    return check


_tensor_meta, _weight_meta = _meta(_extent), _meta(_union({"as_int": _size}))


_tensor = _record({"name": _name})
_whole = _union({"as_int": _integer, "as_name": _name})
_ARGUMENT: dict[str, Check] = {
    "as_none": _nothing(True),
    "as_tensor": _tensor,
    "as_tensors": _list(_tensor),
    "as_int": _integer,
    "as_ints": _list(_integer),
    "as_float": _number,
    "as_floats": _list(_number),
    "as_string": _text,
    "as_strings": _list(_text),
    "as_sym_int": _whole,
    "as_sym_ints": _list(_whole),
    "as_sym_float": _symbolic,
    "as_sym_floats": _symbolic,
    "as_sym_bool": _union({"as_bool": _boolean, "as_name": _name}),
    "as_sym_bools": _symbolic,
    "as_scalar_type": _scalar_type,
    "as_memory_format": _size,
    "as_layout": _size,
    "as_device": _device,
    "as_bool": _boolean,
    "as_bools": _list(_boolean),
    "as_optional_tensors": _list(_union({"as_tensor": _tensor, "as_none": _nothing(True)})),
    "as_optional_tensor": _union({"as_tensor": _tensor, "as_none": _nothing(True)}),
    "as_complex": _record({"real": _number, "imag": _number}),
    "as_int_lists": _list(_list(_integer)),
    "as_float_lists": _list(_list(_number)),
    "as_nested_tensors": _list(_list(_tensor)),
    "as_graph": _sub_program,
    "as_operator": _sub_program,
    "as_string_to_argument": _sub_program,
    "as_custom_obj": _script_object,
}
_argument = _union(_ARGUMENT)


def _region_argument(value: Any, place: str) -> dict[str, Any]:
    """An argument of a region; one of the arguments is its graph."""
    result: dict[str, Any] = _union({**_ARGUMENT, "as_graph": _record({"name": _name, "graph": _GRAPH})})(value, place)
    return result


def _target(value: Any, place: str) -> str:
    """The name of an operator that computes tensors from tensors and opens no files."""
    if type(value) is not str:
        raise _wrong(place, "the name of an operator")
    if value in _REGIONS:
        return value
    if _WHOLE.fullmatch(value):
        return value
    if _SYMBOLIC.fullmatch(value):
        return str(_symbolic(value, place))
    if value.startswith("torch.ops.higher_order."):
        return str(_sub_program(value, place))
    match = _OPERATOR.fullmatch(value)
    if match is None or match[2] in _FILES:
        raise UnsupportedOperator(f"{printable(value)} is no operator that is read from a file: only those of ATen and torchvision are", _PASS_IT)
    namespace, name, overload = match.groups()
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(operator, torch._ops.OpOverload):
        missing = "import torchvision before" if namespace == "torchvision" else "export the module again with this PyTorch release"
        raise UnsupportedOperator(f"PyTorch has no operator {printable(value)}", missing)
    kinds = [str(result.type) for result in operator._schema.returns]
    if not all("Tensor" in kind for kind in kinds) or not (kinds or name.startswith("_assert_")):
        raise UnsupportedOperator(f"{printable(value)} does not return tensors", "replace it by tensor operations")
    return value


def _trace(value: Any, place: str) -> str:
    """File and line of a stack trace's last call; the rest is not shown."""
    lines = re.findall(r'File "([^"\n]+)", line (\d{1,9})', _text(value, place))
    return f'File "{printable(lines[-1][0])}", line {lines[-1][1]}' if lines else ""


def _modules(value: Any, place: str) -> str:
    """The path of the innermost module: PyTorch's form is "key,path,type;key,path,type"."""
    fields = _text(value, place).split(";")[-1].split(",")
    path = "".join(c for c in printable(fields[1]) if c not in "()[]") if len(fields) >= 3 else ""
    return f"module,{path},torch.nn.Module"


_METADATA = _record({}, {"stack_trace": _trace, "nn_module_stack": _modules})


def _node(value: Any, place: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong(place, "a node")
    is_region = value.get("target") in _REGIONS
    inputs = _record({"name": _keyword, "arg": _region_argument if is_region else _argument}, {"kind": _optional(_size)})
    result: dict[str, Any] = _record(
        {"target": _target, "inputs": _list(inputs), "outputs": _list(_argument), "metadata": _METADATA},
        {"is_hop_single_tensor_return": _optional(_boolean), "name": _optional(_name)},
    )(value, place)
    return result


def _GRAPH(value: Any, place: str) -> dict[str, Any]:
    result: dict[str, Any] = _record(
        {
            "inputs": _list(_argument),
            "outputs": _list(_argument),
            "nodes": _list(_node),
            "tensor_values": _table(_name, _tensor_meta),
            "sym_int_values": _table(_name, _extent),
            "sym_bool_values": _table(_name, _union({"as_bool": _boolean, "as_expr": _expression})),
        },
        {
            "is_single_tensor_return": _boolean,
            "custom_obj_values": _table(_name, _script_object),
            "sym_float_values": _table(_name, _symbolic),
        },
    )(value, place)
    return result


_user_value = _record({"arg": _argument})
_constant = _union({"as_none": _nothing(True), "as_int": _integer, "as_float": _number, "as_string": _text, "as_bool": _boolean})
_INPUT = _union(
    {
        "user_input": _user_value,
        "parameter": _record({"arg": _tensor, "parameter_name": _path}),
        "buffer": _record({"arg": _tensor, "buffer_name": _path, "persistent": _boolean}),
        "tensor_constant": _record({"arg": _tensor, "tensor_constant_name": _path}),
        "constant_input": _record({"name": _name, "value": _constant}),
        "custom_obj": _script_object,
        "token": _script_object,
    }
)
_OUTPUT = _union(
    {
        "user_output": _user_value,
        "buffer_mutation": _record({"arg": _tensor, "buffer_name": _path}),
        "user_input_mutation": _record({"arg": _tensor, "user_input_name": _name}),
        "loss_output": _trained,
        "parameter_mutation": _trained,
        "gradient_to_parameter": _trained,
        "gradient_to_user_input": _trained,
        "token": _trained,
    }
)


# --- nested inputs and outputs ----------------------------------------------------------------------------------------


def _containers(value: Any, place: str) -> str:
    """A specification of nested containers as JSON text, rebuilt from the supported kinds of container."""
    try:
        protocol, specification = json.loads(_text(value, place))
    except (ValueError, TypeError) as error:
        raise _wrong(place, "a specification of containers") from error
    if protocol != 1:
        raise _wrong(place, "a specification of containers in protocol 1")
    return json.dumps([1, _container(specification, place, 0)])


_CONTAINER = _record({"type": _optional(_text), "context": lambda value, place: value, "children_spec": _of(list, "a list")})


def _container(value: Any, place: str, depth: int) -> dict[str, Any]:
    if depth > _DEEPEST_CONTAINER:
        raise _wrong(place, f"nested at most {_DEEPEST_CONTAINER} deep")
    node = _CONTAINER(value, place)
    kind, context = node["type"], node["context"]
    children = [_container(child, place, depth + 1) for child in node["children_spec"]]
    if kind is None:
        if children:
            raise _wrong(place, "a leaf")
        return {"type": None, "context": None, "children_spec": []}
    if kind in ("builtins.tuple", "builtins.list"):
        return {"type": kind, "context": "null", "children_spec": children}
    if kind == "collections.defaultdict":  # its factory would be imported by name
        kind, context = "builtins.dict", json.dumps(context.get("dict_context") if isinstance(context, dict) else None)
    if kind in ("builtins.dict", "collections.OrderedDict"):
        keys = json.loads(_text(context, place))
        if type(keys) is not list or len(keys) != len(children) or not all(type(key) in (str, int, float, bool) for key in keys):
            raise _wrong(place, "a dictionary of a value for each key")
        return {"type": kind, "context": json.dumps(keys), "children_spec": children}
    if kind == "collections.namedtuple" and context in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        if len(getattr(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[context], "_fields", ())) != len(children):
            raise _wrong(place, "a named tuple of a value for each field")
        return {"type": kind, "context": context, "children_spec": children}
    what = context if kind == "collections.namedtuple" else kind
    raise UnsupportedOperator(f"the program takes or returns a {printable(str(what))}, which is not read from a file", _PASS_IT)


def _specification(text: str) -> pytree.TreeSpec:
    return pytree.treespec_loads(text)


def _children(specification: pytree.TreeSpec) -> Sequence[pytree.TreeSpec]:
    children = getattr(specification, "children", None)
    return list(children()) if callable(children) else specification.children_specs


def _calls(value: Any, place: str) -> list[Any]:
    """Only the first entry, which describes the program; the others describe submodules."""
    signature = _record(
        {"inputs": _nothing([]), "outputs": _nothing([]), "in_spec": _containers, "out_spec": _containers},
        {"forward_arg_names": _optional(_list(_name))},
    )
    entries = value[:1] if type(value) is list else value
    result: list[Any] = _list(_record({"fqn": _nothing(""), "signature": signature}))(entries, place)
    return result


def _dialects(value: Any, place: str) -> list[str]:
    """Names of PyTorch's verifiers: TRAINING marks programs that may write to tensors in place."""
    return ["TRAINING"] if "TRAINING" in _list(_text)(value, place) else []


def _symbol(value: Any, place: str) -> str:
    if type(value) is not str or not SYMBOL.fullmatch(value):
        raise _wrong(place, "a symbol of a size")
    return value


_RANGE = _record({"min_val": _optional(_integer), "max_val": _optional(_integer)})
_PROGRAM = _record(
    {
        "graph_module": _record(
            {
                "graph": _GRAPH,
                "signature": _record({"input_specs": _list(_INPUT), "output_specs": _list(_OUTPUT)}),
                "module_call_graph": _calls,
            }
        ),
        "opset_version": _nothing({}),
        "range_constraints": _table(_symbol, _RANGE),
        "schema_version": _record({"major": _integer, "minor": _integer}),
    },
    {"verifiers": _dialects, "torch_version": _nothing(str(torch.__version__)), "guards_code": _optional(_list(guard))},
)
_PAYLOADS = _record(
    {
        "config": _table(
            _path,
            _record({"path_name": _member, "is_param": _boolean, "use_pickle": _boolean}, {"tensor_meta": _optional(_weight_meta)}),
        )
    }
)
