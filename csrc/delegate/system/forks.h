// What a forked child must not keep: its parent's sockets. While any process has one open its peer is told nothing of its end,
// so the children of a rank that was killed would keep it alive in the eyes of the others.
#pragma once

namespace adaptra::delegate::forks {

// Have every child that is forked from now on close this descriptor.
void hold(int descriptor);
void forget(int descriptor) noexcept;

// A number that is another one in a forked child: what was made under an earlier one is the parent's.
[[nodiscard]] unsigned generation() noexcept;

}  // namespace adaptra::delegate::forks
