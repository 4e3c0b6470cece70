"""Addresses as records and arrays, half precision, atomics and calls by address, for compiled kernels.

All are Numba intrinsics at module level: one captured in a closure would get a new identity per process, and the
kernel's disk cache would never hit.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

__all__ = [
    "atomic_add",
    "atomic_exchange",
    "call4",
    "call_kernel",
    "call_tile",
    "compare_exchange",
    "f16_to_f32",
    "f32",
    "f32_to_f16",
    "i8",
    "i16",
    "i32",
    "i64",
    "load_acquire",
    "pause",
    "record",
    "sched_yield",
    "sem_post",
    "sem_wait",
    "stack",
    "store_release",
    "u8",
    "u16",
    "u32",
    "usleep",
]

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)

# glibc and musl; sem_t lives at an address that the caller owns
sched_yield = types.ExternalFunction("sched_yield", types.int32())
usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
sem_post = types.ExternalFunction("sem_post", types.int32(types.intp))
sem_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))


@intrinsic
def record(typingctx, address, dtype):
    """``record(address, DTYPE)``: the structured record at an address; DTYPE is a module-level NumPy dtype."""
    result = dtype.dtype

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(result))

    return result(types.int64, dtype), codegen


def _array_at(element: types.Type) -> tuple[Any, Any]:
    result = types.Array(element, 1, "C")

    def codegen(context, builder, signature, args):
        array = context.make_array(result)(context, builder)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(element)))
        data = builder.inttoptr(args[0], array.data.type)
        arrayobj.populate_array(array, data=data, shape=[args[1]], strides=[itemsize], itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return result(types.int64, types.int64), codegen


# One named intrinsic per element type: Numba's cache index needs them to be importable by name.
@intrinsic
def f32(typingctx, address, size):
    """``f32(address, n)``: the n float32 at an address, as a 1-D array."""
    return _array_at(types.float32)


@intrinsic
def i8(typingctx, address, size):
    """``i8(address, n)``: int8 array."""
    return _array_at(types.int8)


@intrinsic
def i16(typingctx, address, size):
    """``i16(address, n)``: int16 array."""
    return _array_at(types.int16)


@intrinsic
def i32(typingctx, address, size):
    """``i32(address, n)``: int32 array."""
    return _array_at(types.int32)


@intrinsic
def i64(typingctx, address, size):
    """``i64(address, n)``: int64 array."""
    return _array_at(types.int64)


@intrinsic
def u8(typingctx, address, size):
    """``u8(address, n)``: uint8 array."""
    return _array_at(types.uint8)


@intrinsic
def u16(typingctx, address, size):
    """``u16(address, n)``: uint16 array, also the bits of FP16 and BF16."""
    return _array_at(types.uint16)


@intrinsic
def u32(typingctx, address, size):
    """``u32(address, n)``: uint32 array."""
    return _array_at(types.uint32)


@intrinsic
def f16_to_f32(typingctx, bits):
    """FP16 bits (uint16) to float32; exact. Loops over it vectorise (VCVTPH2PS)."""

    def codegen(context, builder, signature, args):
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def f32_to_f16(typingctx, value):
    """float32 to FP16 bits (uint16), rounded to nearest even."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), I16)

    return types.uint16(types.float32), codegen


def _word(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I64.as_pointer())


@intrinsic
def load_acquire(typingctx, address):
    """Atomic load of an int64."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Atomic store of an int64."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx, address, value):
    """Add to an int64; returns the old value. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typingctx, address, value):
    """Replace an int64; returns the old value. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def compare_exchange(typingctx, address, expected, value):
    """Replace an int64 if it equals ``expected``; returns whether it did. Sequentially consistent."""

    def codegen(context, builder, signature, args):
        outcome = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(outcome, 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, signature, args):
        machine = builder.module.triple.split("-")[0]
        void = ir.FunctionType(ir.VoidType(), [])
        if machine in ("x86_64", "i386", "i686"):
            builder.call(cgutils.get_or_insert_function(builder.module, void, "llvm.x86.sse2.pause"), [])
        else:
            builder.asm(void, "isb" if machine == "aarch64" else "", "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), codegen


def _call_by_address(count: int) -> tuple[Any, Any]:
    def codegen(context, builder, signature, args):
        function = ir.FunctionType(ir.VoidType(), [I64] * count)
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * (count + 1)), codegen


@intrinsic
def call_kernel(typingctx, function, arguments, tid, threads):
    """Call the kernel at an address: ``void (*)(int64 arguments, int64 tid, int64 threads)``."""
    return _call_by_address(3)


@intrinsic
def call4(typingctx, function, a, b, c, d):
    """Call ``void (*)(int64, int64, int64, int64)`` at an address."""
    return _call_by_address(4)


@intrinsic
def call_tile(typingctx, function, quants, scales, x, y, steps):
    """Call the tile kernel at an address: five int64 arguments."""
    return _call_by_address(5)


@intrinsic(prefer_literal=True)
def stack(typingctx, size):
    """``stack(bytes)``: the address of that many bytes on the stack, 64-byte aligned; the size is a literal."""
    count = size.literal_value

    def codegen(context, builder, signature, args):
        with builder.goto_entry_block():
            space = builder.alloca(ir.ArrayType(ir.IntType(8), count))
        space.align = 64
        return builder.ptrtoint(space, I64)

    return types.int64(size), codegen
