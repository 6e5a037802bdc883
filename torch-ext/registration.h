// The Python module that an import of the extension yields: empty, its ops register themselves.
// Declared by hand from CPython's stable ABI, so that a build needs no Python headers.
#pragma once

#include <cstddef>

extern "C" {

struct ModuleDefinition {
  struct {
    std::ptrdiff_t references;
    void *type, *init;
    std::ptrdiff_t index;
    void* copy;
  } base;
  const char *name, *doc;
  std::ptrdiff_t state_size;
  void *methods, *slots, *traverse, *clear, *free;
};

void* PyModule_Create2(ModuleDefinition* definition, int api_version);

}  // extern "C"

#define SHORT_CONV_JOIN(a, b) a##b
#define SHORT_CONV_STRING(name) #name

// Twice, so that a name which is itself a macro is expanded.
#define REGISTER_EXTENSION(name) SHORT_CONV_MODULE(name)
#define SHORT_CONV_MODULE(name)                                                           \
  extern "C" __attribute__((visibility("default"))) void* SHORT_CONV_JOIN(PyInit_, name)() { \
    constexpr int kStableApi = 3;                                                         \
    static ModuleDefinition definition{{1, nullptr, nullptr, 0, nullptr},                 \
                                       SHORT_CONV_STRING(name), nullptr, 0,               \
                                       nullptr, nullptr, nullptr, nullptr, nullptr};      \
    return PyModule_Create2(&definition, kStableApi);                                     \
  }
