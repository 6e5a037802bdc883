// What a newer toolchain would take from a newer glibc or libstdc++ than manylinux_2_28 has.
#include <new>
#include <sstream>

// GLIBC_2.32; read by shared_ptr. 0: always use atomic reference counts.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// GLIBCXX_3.4.26.
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();

// GLIBCXX_3.4.29; called where the size of a container or of new[] overflows.
namespace std {
[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
