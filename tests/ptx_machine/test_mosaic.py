"""Launches from host functions, as Mosaic prints them."""

from __future__ import annotations

import pytest

from tools.ptx_machine.launch import Launch, addresses
from tools.ptx_machine.mosaic import UnknownHostFunction, launch_of, offset_in, size_of, split
from tools.ptx_machine.tensor_maps import TensorMap

# Two buffers; a tensor map of the second, [8, 64] bfloat16 in boxes of [4, 64].
TENSOR_MAP = """
  %3 = load ptr, ptr {buffers}, align 8
  %4 = insertvalue {{ ptr, ptr, i64, [2 x i64], [2 x i64] }} undef, ptr %3, 0
  %5 = getelementptr ptr, ptr {buffers}, i32 1
  %6 = load ptr, ptr %5, align 8
  %7 = insertvalue {{ ptr, ptr, i64, [2 x i64], [2 x i64] }} %4, ptr %6, 1
  %8 = insertvalue {{ ptr, ptr, i64, [2 x i64], [2 x i64] }} %7, i64 16, 3, 1
  %9 = alloca [128 x i8], i64 1, align 64
  %10 = extractvalue {{ ptr, ptr, i64, [2 x i64], [2 x i64] }} %8, 1
  %11 = extractvalue {{ ptr, ptr, i64, [2 x i64], [2 x i64] }} %8, 3, 1
  %12 = mul i64 %11, 2
  %13 = ptrtoint ptr %10 to i64
  %14 = add i64 %13, %12
  %15 = inttoptr i64 %14 to ptr
  %16 = alloca i64, i64 2, align 8
  %17 = getelementptr inbounds nuw i64, ptr %16, i64 1
  store i64 8, ptr %16, align 4
  store i64 64, ptr %17, align 4
  %18 = alloca [2 x i64], align 8
  store i64 64, ptr %18, align 4
  %19 = getelementptr i64, ptr %18, i32 1
  store i64 1, ptr %19, align 4
  %20 = alloca i64, i64 2, align 8
  %21 = getelementptr i64, ptr %20, i32 1
  store i64 4, ptr %20, align 4
  store i64 64, ptr %21, align 4
  call void @mosaic_gpu_init_tma_desc(ptr %9, ptr %15, i64 7, i64 2, ptr %16, ptr %18, i64 128, ptr %20)
  %22 = load [128 x i8], ptr %9, align 1
  %23 = alloca {{ ptr, [128 x i8] }}, align 8
  %24 = alloca [2 x i64], align 8
  %25 = getelementptr {{ ptr, [128 x i8] }}, ptr %23, i32 0, i32 0
  store ptr %3, ptr %25, align 8
  store ptr %25, ptr %24, align 8
  %26 = getelementptr i64, ptr %24, i32 1
"""
OLD = f"""
define i32 @one_mosaic_gpu(ptr %0, ptr %1, ptr %2) {{{TENSOR_MAP.format(buffers="%2")}
  %27 = getelementptr {{ ptr, [128 x i8] }}, ptr %23, i32 0, i32 1
  store [128 x i8] %22, ptr %27, align 1
  store ptr %27, ptr %26, align 8
  %28 = call i32 @mosaic_gpu_launch_kernel(ptr %0, i32 3, i32 2, i32 1, i32 0, i32 0, i32 0, i32 128, i32 1, i32 1, i32 4096, i32 0, ptr %1, ptr %24)
  ret i32 %28
}}
"""  # noqa: E501
NEW = f"""
define void @one_mosaic_gpu(ptr %0, ptr %1) {{{TENSOR_MAP.format(buffers="%1")}
  store ptr %9, ptr %26, align 8
  %27 = alloca [2 x i32], align 4
  store i32 0, ptr %27, align 4
  call void @mosaic_gpu_build_kernel_spec(ptr %0, i32 3, i32 2, i32 1, i32 0, i32 0, i32 0, i32 128, i32 1, i32 1, i32 4096, i32 0, i32 2, ptr %24, ptr %27)
  ret void
}}
define void @_mlir_ciface_one_mosaic_gpu(ptr %0, ptr %1) {{
  call void @one_mosaic_gpu(ptr %0, ptr %1)
  ret void
}}
"""  # noqa: E501


@pytest.mark.parametrize("module", [OLD, NEW], ids=["jax 0.11", "jax 0.12"])
def test_the_launch_is_what_the_host_function_asks_for(module: str) -> None:
    first, second = addresses(2)
    tensor = TensorMap(second + 32, 2, sizes=(64, 8), strides=(2, 128), box=(64, 4), swizzle=128)
    assert launch_of(module, [first, second]) == Launch(
        (3, 2, 1), (0, 0, 0), (128, 1, 1), 4096, (first, (tensor,))
    )


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("i64 7, i64 2", "i64 0, i64 2", "type 0"),
        ("mul i64", "frob i64", "frob"),
        ("init_tma_desc(", "init_tma_im2col_desc(", "im2col"),
        ("@one_mosaic_gpu(ptr %0, ptr %1) {", "@one(ptr %0, ptr %1) {", "no function"),
    ],
)
def test_what_is_not_known_is_named(old: str, new: str, named: str) -> None:
    assert old in NEW
    with pytest.raises(UnknownHostFunction, match=named):
        launch_of(NEW.replace(old, new), addresses(2))


def test_buffers_that_are_not_given_are_named() -> None:
    with pytest.raises(UnknownHostFunction, match="not given"):
        launch_of(NEW, addresses(1))


def test_types_have_the_sizes_of_c() -> None:
    assert split("{ i8, [2 x i64] }, i32 %1") == ["{ i8, [2 x i64] }", "i32 %1"]
    assert [size_of(kind) for kind in ("ptr", "i32", "[3 x i16]", "{ i8, i64, i8 }")] == [8, 4, 6, 24]
    assert [offset_in("{ i8, [2 x i64], i32 }", [i]) for i in range(3)] == [0, 8, 24]
    assert offset_in("{ i8, [2 x i64], i32 }", [1, 1]) == 16
