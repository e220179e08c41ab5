// The liveness listener: who is answered, and who can't keep others from an answer.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <vector>

#include "check.h"
#include "delegate/security/hmac.h"
#include "delegate/system/sockets.h"
#include "liveness/listener.h"

using namespace adaptra;

namespace {

using Nonce = std::array<std::byte, liveness::kNonceBytes>;

const std::array<std::byte, 4> kKey{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};

// A connection whose reads wait; -1 if it is refused.
int connected(std::uint16_t port) {
  const delegate::SocketAddress address = delegate::resolve("127.0.0.1", port);
  const int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  check(made >= 0, "a socket");
  if (connect(made, address.get(), address.length) == 0) return made;
  check(errno == ECONNREFUSED, "to be refused if not accepted");
  close(made);
  return -1;
}

bool is_answered(int socket, const Nonce& nonce, std::size_t first) {
  check(send(socket, nonce.data(), first, MSG_NOSIGNAL) == static_cast<ssize_t>(first), "to send the beginning");
  const std::size_t rest = nonce.size() - first;
  check(send(socket, nonce.data() + first, rest, MSG_NOSIGNAL) == static_cast<ssize_t>(rest), "to send the rest");
  delegate::Digest got{};
  const ssize_t read = recv(socket, got.data(), got.size(), MSG_WAITALL);
  close(socket);
  return read == static_cast<ssize_t>(got.size()) && delegate::equal_in_constant_time(got, delegate::hmac_sha256(kKey, nonce));
}

}  // namespace

void test_liveness() {
  Nonce nonce{};
  nonce.fill(std::byte{7});
  liveness::Listener listener("127.0.0.1", kKey);
  check(is_answered(connected(listener.port()), nonce, nonce.size()), "the answer under the key");

  std::vector<int> strangers;
  for (int k = 0; k < 100; ++k) strangers.push_back(connected(listener.port()));
  for (const std::size_t first : {1UL, 15UL}) {
    check(is_answered(connected(listener.port()), nonce, first), "an answer beside strangers that say nothing");
  }
  for (const int one : strangers) close(one);

  const pid_t child = fork();
  check(child >= 0, "a child");
  if (child == 0) {
    listener.close();  // a copy: does nothing
    _exit(listener.is_copy() ? 0 : 1);
  }
  int status = 0;
  check(waitpid(child, &status, 0) == child && status == 0, "the child to have a copy");
  check(is_answered(connected(listener.port()), nonce, 8), "the parent's listener to be left alone by a child");

  const std::uint16_t port = listener.port();
  listener.close();
  listener.close();
  check(connected(port) == -1, "to be refused once it is closed");
}
