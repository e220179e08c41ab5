// Sockets that forked children must not keep. While any process has a socket open, its peer is told nothing of its end. So the
// children of a rank that was killed would keep it alive in the eyes of the others.
#pragma once

namespace adaptra::delegate::forks {

// Have every child that is forked from now on close this descriptor.
void hold(int descriptor);
void forget(int descriptor) noexcept;

// A number that differs in a forked child: objects made under an earlier one are the parent's.
[[nodiscard]] unsigned generation() noexcept;

}  // namespace adaptra::delegate::forks
