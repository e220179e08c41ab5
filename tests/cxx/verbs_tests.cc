// Tests of the parts of the verbs wire that need no device: a library that is not there, and the greeting of peers.
#include <cstring>
#include <string>
#include <variant>

#include "check.h"
#include "delegate/verbs/ibverbs_dl.h"
#include "delegate/verbs/verbs.h"
#include "delegate/verbs/verbs_queue_pair.h"
#include "delegate/wire/poller.h"

using namespace adaptra::delegate;

namespace {

bool says(const std::variant<Verbs, Reason>& loaded, const char* what) {
  const auto* const reason = std::get_if<Reason>(&loaded);
  return reason != nullptr && reason->text.find(what) != std::string::npos;
}

// A missing library, and one that is another, are reasons and end nothing.
void test_absence() {
  check(says(load_verbs("libno-such-thing.so.1"), "libno-such-thing.so.1: cannot open"), "the missing file to be named");
  check(says(load_verbs("libno-such-thing.so.1"), "install libibverbs"), "what to install");
  check(says(load_verbs("libm.so.6"), "libm.so.6 has no ibv_get_device_list"), "the missing function to be named");
  const VerbsPorts found = find_verbs_ports();
  check(found.ports.empty() != found.reason.empty(), "ports, or the reason why there are none");
  EpollPoller poller;
  try {
    const auto wire = make_verbs_wire("no_such_device", 1, poller);
    check(false, "a device that is not there to be refused");
  } catch (const std::invalid_argument& error) {
    check(std::string(error.what()).starts_with("RDMA port no_such_device/1: "), "the port to be named");
  }
}

void test_greeting() {
  Greeting greeting{.number = 0xabcdef, .first_packet = 0x123456, .lid = 77, .mtu = IBV_MTU_2048};
  for (std::size_t k = 0; k < sizeof greeting.gid.raw; ++k) greeting.gid.raw[k] = static_cast<std::uint8_t>(k);
  Greeting read;
  std::string reason;
  check(decode(encode(greeting), read, reason), "a greeting to be read");
  check(read.number == greeting.number && read.first_packet == greeting.first_packet && read.lid == 77, "its numbers");
  check(read.mtu == IBV_MTU_2048 && !read.is_infiniband, "its port");
  check(std::memcmp(read.gid.raw, greeting.gid.raw, sizeof read.gid.raw) == 0, "its address");

  GreetingBytes bytes = encode(greeting);
  bytes[0] ^= std::byte{1};
  check(!decode(bytes, read, reason) && reason == "its peer speaks no verbs of version 1 here", "another magic to be refused");
  for (const std::size_t at : {7U, 11U, 14U}) {  // a 25th bit of either number, a packet size that there is not
    bytes = encode(greeting);
    bytes[at] = std::byte{9};
    check(!decode(bytes, read, reason) && reason.find("impossible") != std::string::npos, "impossible numbers to be refused");
  }
}

}  // namespace

void test_verbs() {
  test_absence();
  test_greeting();
}
