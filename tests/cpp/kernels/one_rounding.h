// Arithmetic for references that round after each operation: one rounding a function, and no
// inlining, so that no compiler can fuse two of them.

#pragma once

namespace pydist::scalar {

template <typename T>
[[gnu::noinline]] T add(T a, T b) {
  return a + b;
}
template <typename T>
[[gnu::noinline]] T multiply(T a, T b) {
  return a * b;
}
template <typename T>
[[gnu::noinline]] T divide(T a, T b) {
  return a / b;
}

}  // namespace pydist::scalar
