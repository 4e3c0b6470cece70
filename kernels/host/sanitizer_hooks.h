// The calls that g++'s instrumentation makes, answered here instead of by libtsan, libubsan and libasan:
//   check mode: -fsanitize=thread (every access) and some of -fsanitize=undefined (alignment, bounds, overflow)
//   kasan mode: -fsanitize=kernel-address (every access; red zones around static shared arrays)
#pragma once
#include "checker.h"

#define EMU_HOOK extern "C" EMU_HIDDEN void
#define EMU_CHECK(p, size, access) emu::check_access((uintptr_t)(p), size, emu::Access::access, EMU_CALLER)
#define EMU_TSAN_KIND(kind, size, access) \
  EMU_HOOK __tsan_##kind##size(void* p) { EMU_CHECK(p, size, access); }
#define EMU_TSAN(size)                        \
  EMU_TSAN_KIND(read, size, read)             \
  EMU_TSAN_KIND(write, size, write)           \
  EMU_TSAN_KIND(volatile_read, size, read)    \
  EMU_TSAN_KIND(volatile_write, size, write)  \
  EMU_TSAN_KIND(unaligned_read, size, read)   \
  EMU_TSAN_KIND(unaligned_write, size, write)
EMU_TSAN(1)
EMU_TSAN(2)
EMU_TSAN(4)
EMU_TSAN(8)
EMU_TSAN(16)
EMU_HOOK __tsan_read_range(void* p, size_t n) { EMU_CHECK(p, n, read); }
EMU_HOOK __tsan_write_range(void* p, size_t n) { EMU_CHECK(p, n, write); }
EMU_HOOK __tsan_init() {}
EMU_HOOK __tsan_func_entry(void*) {}
EMU_HOOK __tsan_func_exit() {}

// ---- undefined behaviour: the layouts are GCC's (libsanitizer/ubsan/ubsan_handlers.h) ---------------------------------

namespace emu {
struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation location;
  TypeDescriptor* type;
  unsigned char log_alignment, kind;
};
struct OutOfBounds {
  SourceLocation location;
  TypeDescriptor *array, *index;
};
struct Overflow {
  SourceLocation location;
  TypeDescriptor* type;
};
struct ShiftOutOfBounds {
  SourceLocation location;
  TypeDescriptor *left, *right;
};

__attribute__((format(printf, 2, 3)))
inline void fail_undefined(const SourceLocation& location, const char* format, ...) {
  name_source(location.file, (int)location.line);
  va_list values;
  va_start(values, format);
  describe_fault(current, 0, format, values);
  va_end(values);
  leave_kernel();
}
}  // namespace emu

EMU_HOOK __ubsan_handle_type_mismatch_v1(emu::TypeMismatch* d, uintptr_t address) {
  static const char* const kinds[] = {"load", "store", "reference binding", "member access", "member call"};
  const char* kind = d->kind < 5 ? kinds[d->kind] : "use";
  emu::fail_undefined(d->location, "misaligned %s at %p: %s requires %d-byte alignment", kind, (void*)address,
                      d->type->name, 1 << d->log_alignment);
}
EMU_HOOK __ubsan_handle_out_of_bounds(emu::OutOfBounds* d, uintptr_t index) {
  emu::fail_undefined(d->location, "index %ld out of bounds for type %s", (long)(int)index, d->array->name);
}
EMU_HOOK __ubsan_handle_divrem_overflow(emu::Overflow* d, uintptr_t, uintptr_t) {
  emu::fail_undefined(d->location, "integer division by zero or overflow");
}
EMU_HOOK __ubsan_handle_shift_out_of_bounds(emu::ShiftOutOfBounds* d, uintptr_t, uintptr_t exponent) {
  emu::fail_undefined(d->location, "shift exponent %ld out of range for %s", (long)exponent, d->left->name);
}
#define EMU_OVERFLOW(name, ...) \
  EMU_HOOK __ubsan_handle_##name##_overflow(__VA_ARGS__) { emu::fail_undefined(d->location, "signed overflow: " #name); }
EMU_OVERFLOW(add, emu::Overflow* d, uintptr_t, uintptr_t)
EMU_OVERFLOW(sub, emu::Overflow* d, uintptr_t, uintptr_t)
EMU_OVERFLOW(mul, emu::Overflow* d, uintptr_t, uintptr_t)
EMU_OVERFLOW(negate, emu::Overflow* d, uintptr_t)

// ---- kernel address sanitizer: red zones ------------------------------------------------------------------------------

namespace emu {
struct AsanGlobal {
  uintptr_t begin, size, size_with_redzone;
  const char *name, *module;
  uintptr_t dynamic_init;
  void* location;
  uintptr_t odr_indicator;
};
// Registered by constructors of the module, which run before this unit's own.
inline std::vector<AsanGlobal>& asan_globals() {
  static std::vector<AsanGlobal> globals;
  return globals;
}

inline void check_red_zones(uintptr_t address, size_t size, Access access, uintptr_t pc) {
  if (!launch.in_kernel) return;
  for (const AsanGlobal& global : asan_globals()) {
    if (address >= global.begin + global.size_with_redzone || address + size <= global.begin) continue;
    if (address < global.begin || address + size > global.begin + global.size)
      EMU_FAIL(pc, "out-of-bounds %s of %zu byte(s) at offset %ld of '%s' (size %zu)",
               access == Access::read ? "read" : "write", size, (long)(address - global.begin), global.name,
               (size_t)global.size);
    return;
  }
  check_access(address, size, access, pc);
}
}  // namespace emu

EMU_HOOK __asan_register_globals(emu::AsanGlobal* globals, uintptr_t count) {
  emu::asan_globals().insert(emu::asan_globals().end(), globals, globals + count);
}
EMU_HOOK __asan_unregister_globals(emu::AsanGlobal*, uintptr_t) {}
EMU_HOOK __asan_init() {}
EMU_HOOK __asan_version_mismatch_check_v8() {}
EMU_HOOK __asan_handle_no_return() {}
#define EMU_CHECK_ZONES(p, size, access) emu::check_red_zones(p, size, emu::Access::access, EMU_CALLER)
EMU_HOOK __asan_loadN_noabort(uintptr_t p, size_t n) { EMU_CHECK_ZONES(p, n, read); }
EMU_HOOK __asan_storeN_noabort(uintptr_t p, size_t n) { EMU_CHECK_ZONES(p, n, write); }
#define EMU_KASAN(size)                                                                    \
  EMU_HOOK __asan_load##size##_noabort(uintptr_t p) { EMU_CHECK_ZONES(p, size, read); }    \
  EMU_HOOK __asan_store##size##_noabort(uintptr_t p) { EMU_CHECK_ZONES(p, size, write); }
EMU_KASAN(1)
EMU_KASAN(2)
EMU_KASAN(4)
EMU_KASAN(8)
EMU_KASAN(16)
