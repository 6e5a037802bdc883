// The Python module that an import of the extension yields: empty, its ops register themselves.
// Declared by hand from CPython's stable ABI, so that a build needs no Python headers.
#pragma once

#include <cstddef>

extern "C" {

struct ModuleDefinition {
  std::ptrdiff_t references = 1;
  void *type = nullptr, *init = nullptr;
  std::ptrdiff_t index = 0;
  void* copy = nullptr;
  const char *name, *doc = nullptr;
  std::ptrdiff_t state_size = 0;
  void *methods = nullptr, *slots = nullptr, *traverse = nullptr, *clear = nullptr, *free = nullptr;
};

void* PyModule_Create2(ModuleDefinition* definition, int api_version);

}  // extern "C"

// In two steps, so that a name which is itself a macro is expanded.
#define REGISTER_EXTENSION(name) SHORT_CONV_MODULE(name)
#define SHORT_CONV_MODULE(module)                                             \
  extern "C" __attribute__((visibility("default"))) void* PyInit_##module() { \
    constexpr int kStableApi = 3;                                             \
    static ModuleDefinition definition;                                       \
    definition.name = #module;                                                \
    return PyModule_Create2(&definition, kStableApi);                         \
  }
