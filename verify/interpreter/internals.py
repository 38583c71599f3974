"""The names inside Triton that its interpreter's patches use. None of them is documented, so another release may lack them.

All other modules of this package reach these names through `get` and `put`, or import from here what works on objects of Triton.
Their own imports from Triton are its public language. docs/map.md shows these names in a table.
"""

import ast
import inspect
import pkgutil
from typing import Any

_INTERPRETER = "triton.runtime.interpreter"
# What has the names (a module, or a class of a module), and the names.
NAMES: dict[str, tuple[str, ...]] = {
    _INTERPRETER: (
        *("ASTTransformer", "FunctionRewriter", "GridExecutor", "InterpretedFunction", "InterpreterBuilder", "ReduceOps"),
        *("ScanOps", "TensorHandle", "TritonSemantic", "_get_np_dtype", "_implicit_cvt", "_ir", "_patch_attr", "_patch_lang"),
        *("interpreter_builder", "interpreter_semantic"),
    ),
    f"{_INTERPRETER}:ASTTransformer": ("visit_Assign", "visit_Call", "visit_For"),
    f"{_INTERPRETER}:FunctionRewriter": (
        *("_compile_and_exec", "_get_jit_fn_file_line", "_transform_ast", "ast_transformer", "def_file_lineno", "fn"),
    ),
    f"{_INTERPRETER}:GridExecutor": (
        *("__call__", "_init_args_hst", "_restore_args_dev", "arg_names", "constexprs", "fn", "grid", "pre_run_hooks"),
    ),
    f"{_INTERPRETER}:InterpretedFunction": ("__call__", "arg_names", "fn", "rewrite", "rewriter", "rewritten_fn", "run"),
    f"{_INTERPRETER}:InterpreterBuilder": (
        *("binary_op", "cast_impl", "create_addptr", "create_advance", "create_ashr", "create_atomic_cas", "create_atomic_load"),
        *("create_atomic_poll", "create_atomic_rmw", "create_atomic_store", "create_bitcast", "create_broadcast", "create_cat"),
        *("create_clampf", "create_descriptor_gather", "create_descriptor_load", "create_descriptor_scatter"),
        *("create_descriptor_store", "create_dot", "create_dot_scaled", "create_erf", "create_expand_dims", "create_fabs"),
        *("create_fma", "create_fp_to_fp", "create_gather", "create_get_program_id", "create_histogram", "create_idiv"),
        *("create_int_to_ptr", "create_join", "create_load", "create_make_block_ptr", "create_make_range"),
        *("create_make_tensor_descriptor", "create_masked_load", "create_masked_store", "create_maxnumf", "create_minnumf"),
        *("create_print", "create_ptr_to_int", "create_reshape", "create_rsqrt", "create_select", "create_splat", "create_split"),
        *("create_store", "create_tensor_pointer_load", "create_tensor_pointer_store", "create_trans", "create_umulhi"),
        *("create_unsplat", "get_bf16", "options", "set_grid_dim", "set_grid_idx", "ternary_op", "unary_op"),
    ),
    f"{_INTERPRETER}:ReduceOps": ("axis", "keep_dims", "min_max", "sum", "to_tensor"),
    f"{_INTERPRETER}:ScanOps": ("axis", "cumprod", "cumsum", "to_tensor"),
    f"{_INTERPRETER}:TensorHandle": ("__post_init__", "data", "dtype", "get_element_ty"),
    "triton.language.semantic:TritonSemantic": (
        *("add", "binary_op_type_checking_impl", "broadcast_impl_value", "builder", "cast", "equal", "floordiv", "greater_equal"),
        *("greater_than", "less_equal", "less_than", "mod", "mul", "not_equal", "scalar_constant", "sub", "to_tensor", "truediv"),
    ),
    "triton.language.core": ("_unwrap_if_constexpr", "associative_scan", "is_builtin", "reduce"),
    "triton.language.core:block_type": ("__init__", "element_ty", "name", "numel", "shape"),
    "triton.language.core:tensor": ("T", "__bool__", "__index__", "__init__", "dtype", "handle", "numel", "shape", "type"),
    "triton.language.standard": (
        *("_argmax_combine_tie_break_fast", "_argmax_combine_tie_break_left", "_argmin_combine_tie_break_fast"),
        *("_argmin_combine_tie_break_left", "_elementwise_max", "_elementwise_min", "_prod_combine", "_sum_combine"),
    ),
    "triton.runtime.autotuner:Autotuner": ("_bench",),
    "triton.runtime.jit": ("_normalize_ty",),
}
# Names that we add, or that Triton gives to a class when the first kernel is launched.
ADDED = frozenset({"ASTTransformer.visit_Call", "ASTTransformer.visit_For", "tensor.__bool__", "tensor.__index__"})
_OWNERS = {owner.replace(":", ".").rpartition(".")[2]: owner for owner in NAMES}
# Names that not every tested release has, and the releases that have them.
ONLY: dict[str, tuple[str, ...]] = {
    "InterpreterBuilder.create_advance": ("3.7.1",),
    "InterpreterBuilder.create_atomic_load": ("3.9.0",),
    "InterpreterBuilder.create_atomic_poll": ("3.9.0",),
    "InterpreterBuilder.create_atomic_store": ("3.9.0",),
    "InterpreterBuilder.create_dot_scaled": ("3.8.0", "3.9.0"),
    "InterpreterBuilder.create_make_block_ptr": ("3.7.1",),
    "InterpreterBuilder.create_tensor_pointer_load": ("3.7.1",),
    "InterpreterBuilder.create_tensor_pointer_store": ("3.7.1",),
    "InterpreterBuilder.get_bf16": ("3.9.0",),
}


def get(name: str) -> Any:
    """What Triton has under a name, given as `owner.name`: the owner is the last word of a key of NAMES."""
    owner, name = _found(name)
    return getattr(owner, name)


def put(name: str, value: Any) -> None:
    """Replace what Triton has under a name."""
    owner, name = _found(name)
    setattr(owner, name, value)


def _found(text: str) -> tuple[Any, str]:
    owner, _, name = text.partition(".")
    assert name in NAMES[_OWNERS[owner]] or name.startswith("_gdn_"), f"{text} is not in NAMES"
    return pkgutil.resolve_name(_OWNERS[owner]), name


def absent() -> set[str]:
    """The names that the installed release lacks, as `owner.name`, without those of ADDED."""
    missing = set[str]()
    for short, path in _OWNERS.items():
        try:
            owner = pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            owner = None
        constructors = [vars(kind).get("__init__") for kind in getattr(owner, "__mro__", ())]
        attributes = [name for function in constructors if hasattr(function, "__code__") for name in function.__code__.co_names]
        known = {*dir(owner), *getattr(owner, "__annotations__", ()), *attributes} if owner is not None else set[str]()
        missing |= {f"{short}.{name}" for name in NAMES[path] if name not in known}
    return missing - ADDED


# What works on objects of Triton


def combines(name: str) -> Any:
    """A function with which Triton's reductions and scans combine two elements."""
    return get(f"standard.{name}")


def argument_type(annotation: Any) -> Any:
    """A parameter's annotation, as Triton abbreviates it: "i64" for tl.int64."""
    return get("jit._normalize_ty")(annotation)


def on_host(executor: Any, positional: Any, named: Any) -> Any:
    """The arguments of a launch, in the memory of the host."""
    return executor._init_args_hst(positional, named)


def back_on_device(executor: Any, positional: Any, hosted: Any, named: Any, hosted_named: Any) -> None:
    """Copy what a launch wrote back to the arguments of its caller."""
    executor._restore_args_dev(positional, hosted, named, hosted_named)


def compiled(rewriter: Any, source: str) -> Any:
    """The Python function that the interpreter makes of a kernel's source."""
    return rewriter._compile_and_exec(rewriter._transform_ast(source))


def rewritten(rewriter: Any, source: str) -> tuple[ast.Module, int]:
    """The tree of a kernel's source as the interpreter's transformer leaves it, and the line of its file where it begins."""
    return rewriter.ast_transformer.visit(ast.parse(source)), rewriter.def_file_lineno


def place_of(rewriter: Any) -> tuple[str, int]:
    """The file of a kernel, and the line of its `def`. Triton finds the line after it has read the source once more."""
    lines, first = inspect.findsource(rewriter.fn)
    numbers = (number for number, line in enumerate(lines[first:], first + 1) if line.strip().startswith("def "))
    return rewriter.fn.__code__.co_filename, next(numbers)


def is_aggregate(value: Any) -> bool:
    """Whether a value of a kernel is an object with fields, as Triton 3.8's block pointers are."""
    return getattr(type(value), "__triton_aggregate__", False)


def pads_with_nan(option: Any) -> bool | None:
    """Whether a block pointer's load pads with NaN. None if it pads with neither NaN nor zero."""
    options = get("interpreter._ir").PADDING_OPTION
    return True if option == options.PAD_NAN else False if option in (None, options.PAD_ZERO) else None


def propagates_nan(option: Any) -> bool:
    """Whether a clamp of NaN is NaN; otherwise it is the lower bound."""
    return bool(option != get("interpreter._ir").PROPAGATE_NAN.NONE)


def skips_nan() -> bool:
    """Whether this release's reductions leave NaN out when they look for the largest and smallest element. 3.7.1's do not."""
    return not hasattr(get("interpreter.InterpreterBuilder"), "create_make_block_ptr")
