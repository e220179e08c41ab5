// The links between hosts that are network namespaces of this machine. The router moves every IP packet from host to host. It
// holds each for the link's one-way delay, lets it leave no faster than the link's rate, or loses it.
//
//   router HOSTS RAILS FOLDER
//
// Every host is a namespace with an interface wan<rail> per rail, a TUN device whose other end is here. Host h has the address
// 10.77.<rail>.<h+1>. The first line on standard output has the descriptor of each host's namespace, for /proc/PID/fd/ of this
// process.
//
// The socket FOLDER/control takes changes, one in a message: `FROM TO RAIL WHAT VALUE`. It answers with an empty message or
// with what is wrong. With `*` for one of the hosts it is the other's port, which all that it sends or receives shares. WHAT
// is:
//
//   delay: seconds.
//   rate: bytes per second, 0 for no limit.
//   loss: a probability.
//   queue: bytes that wait for the rate before packets are dropped.
//   up: 0 or 1.
//   reset: ends every connection that there is.
//
// When standard input ends, so when its starter does, the router ends every process in its namespaces and then itself.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <malloc.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <system_error>
#include <unordered_set>
#include <vector>

#include "link.h"
#include "packet.h"

namespace {

// A packet of at most this size is copied, so that waiting packets take no more than their size.
constexpr std::size_t kSmallBytes = 4096;
constexpr int kBatch = 64;  // packets of one host before the others' turn

template <typename Result>
Result check(Result result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

class Router {
 public:
  Router(std::size_t hosts, std::size_t rails, std::filesystem::path folder)
      : hosts_(hosts),
        rails_(rails),
        folder_(std::move(folder)),
        links_(hosts * hosts * rails),
        leaving_(hosts * rails),
        arriving_(hosts * rails),
        resets_(links_.size()) {
    for (std::size_t host = 0; host < hosts; ++host) make_host();
    control_ = check(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), "socket");
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    (folder_ / "control").string().copy(address.sun_path, sizeof address.sun_path - 1);
    check(bind(control_, reinterpret_cast<const sockaddr*>(&address), sizeof address), "bind the control socket");
    check(listen(control_, 16), "listen");
  }

  [[nodiscard]] const std::vector<int>& namespaces() const { return namespaces_; }

  void run() {
    std::vector<pollfd> polled = {{STDIN_FILENO, POLLIN, 0}, {control_, POLLIN, 0}};
    for (const int tun : tuns_) polled.push_back({tun, POLLIN, 0});
    while (true) {
      const auto wait = std::chrono::duration_cast<std::chrono::nanoseconds>(let_out() - Clock::now());
      const auto limited = std::clamp<std::int64_t>(wait.count(), 0, 999'999'999);
      const timespec timeout{0, static_cast<long>(limited)};
      if (ppoll(polled.data(), polled.size(), &timeout, nullptr) < 0) continue;
      if (polled[0].revents != 0) return;
      for (std::size_t end = 0; end < tuns_.size(); ++end) {
        if (polled[2 + end].revents != 0) take_in(end);
      }
      // A change holds for packets that are sent after it, so those from before come first.
      if (polled[1].revents != 0) {
        let_out();
        apply_change();
      }
    }
  }

  // End every process in the hosts' namespaces: nothing else was started there.
  void end_hosts() const {
    for (bool found = true; found;) {
      found = false;
      for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
        const int process = std::atoi(entry.path().filename().c_str());
        struct stat of_process{};
        if (process <= 0 || process == getpid() || stat((entry.path() / "ns/net").c_str(), &of_process) != 0) continue;
        const bool is_ours = std::any_of(namespaces_.begin(), namespaces_.end(), [&](int descriptor) {
          struct stat one{};
          return fstat(descriptor, &one) == 0 && one.st_dev == of_process.st_dev && one.st_ino == of_process.st_ino;
        });
        found = (is_ours && kill(process, SIGKILL) == 0) || found;
      }
    }
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

 private:
  struct Resets {
    bool any = false;
    std::unordered_set<std::uint32_t> younger;  // connections made since, by their ports
  };

  void make_host() {
    check(unshare(CLONE_NEWNET), "unshare: a new network namespace");
    namespaces_.push_back(check(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), "open /proc/self/ns/net"));
    for (std::size_t rail = 0; rail < rails_; ++rail) {
      const int tun = check(open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "open /dev/net/tun");
      ifreq request{};
      ("wan" + std::to_string(rail)).copy(request.ifr_name, IFNAMSIZ - 1);
      request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
      check(ioctl(tun, TUNSETIFF, &request), "TUNSETIFF");
      check(ioctl(tun, TUNSETVNETHDRSZ, &kPrefix), "TUNSETVNETHDRSZ");
      check(ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4), "TUNSETOFFLOAD");
      tuns_.push_back(tun);
    }
  }

  [[nodiscard]] Link& link(std::size_t from, std::size_t to, std::size_t rail) {
    return links_[(from * hosts_ + to) * rails_ + rail];
  }

  // The resets of both directions.
  [[nodiscard]] Resets& resets(std::size_t from, std::size_t to, std::size_t rail) {
    return resets_[(std::min(from, to) * hosts_ + std::max(from, to)) * rails_ + rail];
  }

  // Packets whose time has come go on: by their sender's port, the link, and their receiver's port. When the next one's does.
  Clock::time_point let_out() {
    auto next = Clock::time_point::max();
    const auto now = Clock::now();
    const auto pass = [&](Link& from, const auto& go_on) {
      while (from.next() <= now) {
        const auto due = from.next();
        go_on(from.leave(), due);
      }
      next = std::min(next, from.next());
    };
    for (std::size_t end = 0; end < tuns_.size(); ++end) {
      pass(leaving_[end], [&](Packet packet, Clock::time_point due) {
        const std::size_t to = receiver(Segment(packet));
        link(end / rails_, to, end % rails_).enter(std::move(packet), due, random_);
      });
    }
    for (std::size_t k = 0; k < links_.size(); ++k) {
      pass(links_[k], [&](Packet packet, Clock::time_point due) {
        arriving_[k / rails_ % hosts_ * rails_ + k % rails_].enter(std::move(packet), due, random_);
      });
    }
    for (std::size_t end = 0; end < tuns_.size(); ++end) {
      pass(arriving_[end], [&](const Packet& packet, Clock::time_point) { put(end, packet); });
    }
    return next;
  }

  static std::size_t receiver(const Segment& segment) { return (ntohl(segment.ip->daddr) & 0xff) - 1U; }

  // A packet that the host's kernel has no room for is lost, as it is in a network card.
  void put(std::size_t end, const Packet& packet) {
    if (write(tuns_[end], packet.bytes.get(), packet.size) < 0 && errno != EAGAIN && errno != EINVAL && errno != EIO) {
      throw std::system_error(errno, std::generic_category(), "write to a TUN device");
    }
  }

  void take_in(std::size_t end) {
    const std::size_t from = end / rails_, rail = end % rails_;
    for (int k = 0; k < kBatch; ++k) {
      if (room_ == nullptr) room_ = std::make_unique_for_overwrite<char[]>(kMostBytes);
      const ssize_t got = read(tuns_[end], room_.get(), kMostBytes);
      if (got <= 0) return;
      Packet packet{nullptr, static_cast<std::size_t>(got)};
      if (packet.size > kSmallBytes) {
        packet.bytes = std::move(room_);
      } else {
        packet.bytes = std::make_unique_for_overwrite<char[]>(packet.size);
        std::memcpy(packet.bytes.get(), room_.get(), packet.size);
      }
      const Segment segment(packet);
      if (segment.ip == nullptr) continue;
      const std::size_t to = receiver(segment);
      if (to >= hosts_ || to == from) continue;
      if (is_to_be_reset(segment, from, to, rail)) {
        put(end, make_reset(segment, true));
        packet = make_reset(segment, false);
      }
      leaving_[end].enter(std::move(packet), Clock::now(), random_);
    }
  }

  bool is_to_be_reset(const Segment& segment, std::size_t from, std::size_t to, std::size_t rail) {
    Resets& known = resets(from, to, rail);
    if (!known.any || segment.tcp == nullptr || segment.tcp->rst) return false;
    std::uint32_t low = segment.tcp->source, high = segment.tcp->dest;
    if (from > to) std::swap(low, high);
    if (segment.tcp->syn && !segment.tcp->ack) known.younger.insert(low << 16 | high);
    return !known.younger.contains(low << 16 | high);
  }

  void apply_change() {
    const int caller = accept4(control_, nullptr, nullptr, SOCK_CLOEXEC);
    if (caller < 0) return;
    char text[256] = {};
    if (recv(caller, text, sizeof text - 1, 0) > 0) {
      const std::string wrong = change(text);
      // A caller that has gone needs no answer.
      [[maybe_unused]] const ssize_t told = send(caller, wrong.data(), wrong.size(), MSG_NOSIGNAL);
    }
    close(caller);
  }

  [[nodiscard]] std::string change(const std::string& text) {
    std::istringstream words(text);
    std::string of, on, what;
    std::size_t rail = 0;
    double value = 0;
    if (!(words >> of >> on >> rail >> what >> value)) return "'" + text + "': expected FROM TO RAIL WHAT VALUE";
    const std::size_t from = host(of), to = host(on);
    if (std::min(from, to) >= hosts_ || (from >= hosts_ && of != "*") || (to >= hosts_ && on != "*") || from == to ||
        rail >= rails_) {
      return "'" + text + "': expected two of " + std::to_string(hosts_) + " hosts, or one and '*', and one of " +
             std::to_string(rails_) + " rails";
    }
    if (of == "*" || on == "*") {
      Link& port = on == "*" ? leaving_[from * rails_ + rail] : arriving_[to * rails_ + rail];
      return port.change(what, value) ? "" : "'" + what + "': expected rate or queue";
    }
    if (what == "reset") {
      resets(from, to, rail) = {true, {}};
      return {};
    }
    return link(from, to, rail).change(what, value) ? "" : "'" + what + "': expected delay, rate, loss, queue, up or reset";
  }

  // A host by its number; more than any for other text.
  static std::size_t host(const std::string& text) {
    const bool is_number = !text.empty() && text.size() < 4 && text.find_first_not_of("0123456789") == std::string::npos;
    return is_number ? std::stoul(text) : std::numeric_limits<std::size_t>::max();
  }

  const std::size_t hosts_, rails_;
  const std::filesystem::path folder_;
  std::vector<int> namespaces_, tuns_;
  int control_ = -1;
  std::vector<Link> links_, leaving_, arriving_;  // the latter two by host and rail
  std::vector<Resets> resets_;
  std::unique_ptr<char[]> room_;  // where the next packet is read
  std::mt19937 random_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) {
    std::fputs("usage: router HOSTS RAILS FOLDER\n", stderr);
    return 2;
  }
  try {
    // A router that has to wait for the hosts' programs would be a slower link than the one asked for.
    setpriority(PRIO_PROCESS, 0, -15);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    Router router(std::stoul(arguments[1]), std::stoul(arguments[2]), arguments[3]);
    for (const int descriptor : router.namespaces()) std::printf("%d ", descriptor);
    std::puts("");
    std::fflush(stdout);
    try {
      router.run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "router: %s\n", error.what());
    }
    router.end_hosts();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "router: %s\n", error.what());
    return 1;
  }
  return 0;
}
