#include "delegate/wire/poller.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <system_error>

namespace adaptra::delegate {
namespace {

constexpr std::size_t kEventsAtATime = 64;

std::uint64_t key_of(int descriptor, std::uint32_t ticket) {
  return std::uint64_t{ticket} << 32 | static_cast<std::uint32_t>(descriptor);
}

void check(int status, const char* what) {
  if (status < 0) throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

EpollPoller::EpollPoller()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wakeup_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)), found_(kEventsAtATime) {
  check(epoll_.get(), "epoll_create1");
  check(wakeup_.get(), "eventfd");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key_of(wakeup_.get(), 0);
  check(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wakeup_.get(), &event), "epoll_ctl");
}

void EpollPoller::add(int descriptor, std::uint32_t events, Handler& handler) {
  const std::uint32_t ticket = ++tickets_ == 0 ? ++tickets_ : tickets_;
  epoll_event event{};
  event.events = events;
  event.data.u64 = key_of(descriptor, ticket);
  check(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event), "epoll_ctl");
  watched_[descriptor] = {ticket, &handler};
}

void EpollPoller::modify(int descriptor, std::uint32_t events, Handler& handler) {
  Watched& watched = watched_.at(descriptor);
  watched.handler = &handler;
  epoll_event event{};
  event.events = events;
  event.data.u64 = key_of(descriptor, watched.ticket);
  check(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, descriptor, &event), "epoll_ctl");
}

void EpollPoller::remove(int descriptor) noexcept {
  watched_.erase(descriptor);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, descriptor, nullptr);
}

std::size_t EpollPoller::wait(int timeout_ms) {
  const int count = epoll_wait(epoll_.get(), found_.data(), static_cast<int>(found_.size()), timeout_ms);
  return count < 0 ? 0 : static_cast<std::size_t>(count);
}

void EpollPoller::dispatch(std::size_t count) {
  for (std::size_t k = 0; k < count; ++k) {
    const auto descriptor = static_cast<int>(found_[k].data.u64 & 0xffffffff);
    const auto ticket = static_cast<std::uint32_t>(found_[k].data.u64 >> 32);
    if (ticket == 0) {
      eventfd_t ignored = 0;
      eventfd_read(wakeup_.get(), &ignored);
      continue;
    }
    const auto found = watched_.find(descriptor);
    if (found != watched_.end() && found->second.ticket == ticket) found->second.handler->ready(found_[k].events);
  }
}

void EpollPoller::wake() noexcept {
  const std::lock_guard lock(wakeup_mutex_);
  if (wakeup_.get() >= 0) eventfd_write(wakeup_.get(), 1);
}

void EpollPoller::close() noexcept {
  const std::lock_guard lock(wakeup_mutex_);
  epoll_ = Descriptor();
  wakeup_ = Descriptor();
}

}  // namespace adaptra::delegate
