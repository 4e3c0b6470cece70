// How the runtime calls a kernel: the builder appends EMU_KERNEL(name) for every `extern "C" __global__` it found.
#pragma once
#include "device_types.h"

template <class T>
EMU_UNCHECKED T emu_argument(void** arguments, size_t index) {
  T value;
  memcpy((void*)&value, arguments[index], sizeof value);
  return value;
}
template <class... A, size_t... I>
EMU_UNCHECKED inline void emu_call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(emu_argument<typename std::remove_cv<A>::type>(arguments, I)...);
}
template <class... A>
EMU_UNCHECKED inline void emu_invoke(void (*kernel)(A...), void** arguments) {
  emu_call(kernel, arguments, std::index_sequence_for<A...>());
}

// One letter a parameter, as in m40llm/device/signature.py, which parses the same from the source: a check of the parser.
template <class T> constexpr char emu_letter() {
  using U = typename std::remove_cv<T>::type;
  if (std::is_pointer<U>::value) return std::is_const<typename std::remove_pointer<U>::type>::value ? 'C' : 'P';
  if (std::is_same<U, float>::value) return 'f';
  if (std::is_same<U, double>::value) return 'd';
  if (std::is_signed<U>::value) return sizeof(U) == 1 ? 'b' : sizeof(U) == 2 ? 'h' : sizeof(U) == 4 ? 'i' : 'q';
  return sizeof(U) == 1 ? 'B' : sizeof(U) == 2 ? 'H' : sizeof(U) == 4 ? 'I' : 'Q';
}
template <class... A>
inline const char* emu_letters(void (*)(A...)) {
  static constexpr char letters[] = {emu_letter<A>()..., 0};
  return letters;
}
#define EMU_KERNEL(k)                                                                  \
  extern "C" EMU_UNCHECKED void emu_invoke__##k(void** arguments) { emu_invoke(k, arguments); } \
  extern "C" const char* emu_letters__##k() { return emu_letters(k); }
